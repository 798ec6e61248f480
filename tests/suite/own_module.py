"""A LightningDataModule as somebody may have one. Apart from the rest, as Lightning takes long to import."""

import lightning
from torch.utils.data import DataLoader, WeightedRandomSampler

from tests.suite.own import Rows


class Module(lightning.LightningDataModule):
    def __init__(self, length: int = 30):
        super().__init__()
        self.length = length

    def setup(self, stage: str) -> None:
        self.parts = Rows(length=self.length), Rows(length=12)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.parts[0], batch_size=3, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.parts[1])


class Weighted(Module):
    def train_dataloader(self) -> DataLoader:
        sampler = WeightedRandomSampler([1.0] * self.length, self.length)
        return DataLoader(self.parts[0], batch_size=3, sampler=sampler)
