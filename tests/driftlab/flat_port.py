"""A port without modules: the weights of a network, under names with underscores."""

from torch import nn


class FlatPort(nn.Module):
    """``fault`` names the one mistake that it makes."""

    def __init__(self, old, fault=""):
        super().__init__()
        self.fault = fault
        for name, parameter in old.named_parameters():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(parameter.detach().clone()))

    def linear(self, name, x):
        return x @ getattr(self, name + "_weight").T + getattr(self, name + "_bias")
