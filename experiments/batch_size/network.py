"""The network in question, in all depths at once, with the statistics of its norms, and its inputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments.batch_size.plan import Plan
from models.policy_net import ConvBlock, PolicyHead, PolicyNet, ResBlock


class AllDepths(nn.Module):
    """Networks of 0, 1, ... ``blocks`` residual blocks that share them: boards [N, ...] -> logits of each.

    From one state of the random generator each of them has the weights, and after the same batches in train
    mode the statistics, that ``PolicyNet`` of that depth has: the weights of a block are drawn before those
    of the next, and what a block sees does not depend on what comes after it.

    Args:
        blocks: of the deepest.
        norm: as in ``PolicyNet``.
        network: filters, planes, board and moves, as in ``PolicyNet``.
    """

    def __init__(self, blocks: int, norm: str, network: dict):
        super().__init__()
        self.settings = {"norm": norm, **network}
        self.conv_block = ConvBlock(network["planes"], network["filters"], norm)
        self.res_blocks, self.policy_heads = nn.ModuleList(), nn.ModuleList()
        for depth in range(blocks + 1):
            if depth:
                self.res_blocks.append(ResBlock(network["filters"], norm))
            with torch.random.fork_rng(devices=[]):  # the next block is drawn as if there were no head here
                head = PolicyHead(network["filters"], network["board"], network["moves"], norm)
            self.policy_heads.append(head)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.conv_block(x)
        logits = [self.policy_heads[0](x)]
        for block, head in zip(self.res_blocks, self.policy_heads[1:], strict=True):
            x = block(x)
            logits.append(head(x))
        return logits

    def deepest(self) -> PolicyNet:
        """The network of all blocks: the same modules, under the names of ``PolicyNet``."""
        with torch.random.fork_rng(devices=[]):
            network = PolicyNet(0, **self.settings)
        network.conv_block, network.res_blocks = self.conv_block, self.res_blocks
        network.policy_head = self.policy_heads[-1]
        return network.train(self.training)


def prepared(plan: Plan, norm: str, seed: int) -> AllDepths:
    """In eval mode on the plan's device, its norms' statistics from uniform random boards in train mode."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        network = AllDepths(plan.blocks, norm, plan.network)
    batches, rows = plan.statistics
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _ in range(batches if norm == "batch" else 0):
            network(torch.rand(rows, *plan.board, generator=generator))
    return network.eval().to(plan.device)


def boards(plan: Plan, inputs: str, seed: int) -> Tensor:
    """All-zero boards, or uniform random ones, as many as the largest batch takes."""
    if inputs == "zeros":
        return torch.zeros(plan.largest, *plan.board, device=plan.device)
    generator = torch.Generator().manual_seed(2**32 + seed)  # another stream than that of the statistics
    return torch.rand(plan.largest, *plan.board, generator=generator).to(plan.device)
