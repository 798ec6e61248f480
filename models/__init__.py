"""What is trained: the networks here, their rewrites in models.rewrites."""

from models.resnet import ResNet18

__all__ = ["ResNet18"]
