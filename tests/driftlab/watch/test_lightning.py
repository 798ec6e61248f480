"""Watching a Trainer: with all that a training may have, it is the same to the last bit."""

import csv

import lightning
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

import driftlab.lightning
from driftlab import DiagnoseError, Verdict
from tests.driftlab.watch.rewrites import Halves, OtherUnderAutocast, network

OPTIONS = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}


class Own(lightning.LightningModule):
    """With a loss of its own, two groups, a scheduler a step and something logged."""

    def __init__(self):
        super().__init__()
        self.net, self.spread = network(), 0.1

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self.net(x + self.spread * torch.randn_like(x))
        loss = F.cross_entropy(out, y, label_smoothing=0.1) + 1e-3 * out.square().mean()
        self.log("train_loss", loss)
        return {"loss": loss, "rows": len(x)}

    def configure_optimizers(self):
        groups = [{"params": self.net[0].parameters()}, {"params": self.net[3].parameters(), "lr": 1e-3}]
        optimizer = torch.optim.AdamW(groups, lr=3e-3)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [3e-3, 1e-3], total_steps=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def rewrite(module, late=lambda: False):
    module.net[0] = Halves(module.net[0], late)
    return module


def loader(workers=0):
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(96, 20, generator=generator), torch.randint(5, (96,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, num_workers=workers)


def fitted(folder, *callbacks, workers=0, ckpt_path=None, module=None, **options):
    lightning.seed_everything(3, verbose=False)
    module = module or Own()
    trainer = lightning.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=list(callbacks),
        **OPTIONS | {"max_epochs": 2, "logger": False, "enable_checkpointing": False} | options,
    )
    trainer.fit(module, loader(workers), ckpt_path=ckpt_path)
    return trainer, [p.detach().clone() for p in module.parameters()]


def watch(**options):
    return driftlab.lightning.Watch(rewrite, **{"budget": 1e9, "updates": 2} | options)


def test_the_first_look_asks_under_the_autocast_of_the_trainer(tmp_path):
    def other(module):
        module.net[0] = OtherUnderAutocast(module.net[0])
        return module

    found = {}
    for precision in ("32-true", "bf16-mixed"):
        watching = driftlab.lightning.Watch(other, budget=1e-9, updates=2)
        fitted(tmp_path, watching, precision=precision, max_epochs=1)
        found[precision] = watching.diagnosis
    assert found["32-true"].verdict in (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)
    assert found["bf16-mixed"].verdict is Verdict.BUG
    assert found["bf16-mixed"].where.module == "module.net.0"


def test_weights_in_bfloat16_are_looked_at_as_they_are(tmp_path):
    watching = watch()
    fitted(tmp_path, watching, precision="bf16-true", max_epochs=1)
    assert watching.diagnosis.verdict is Verdict.ROUND_OFF
    told = {e.probe: e for e in watching.looks[0].diagnosis.evidence}
    assert "bf16-true path" in told["function"].reading


def test_weights_in_float16_are_looked_at_in_float32_and_that_is_said(tmp_path):
    watching = watch()
    with pytest.warns(UserWarning, match="looks are taken in float32 and float64, not in 16-true"):
        fitted(tmp_path, watching, precision="16-true", max_epochs=1)
    # the training itself ends in NaN: Adam's epsilon is 0 in float16
    assert watching.looks[0].diagnosis.verdict in (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)


AS_THEY_ARE = {
    "plain": {},
    "clipping and accumulation": {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
    "mixed precision": {"precision": "bf16-mixed"},
    "two loader workers": {"workers": 2},
}


def averaging():
    return lightning.pytorch.callbacks.EMAWeightAveraging(decay=0.9)


@pytest.mark.parametrize("kind", AS_THEY_ARE)
def test_the_training_is_the_same_to_the_last_bit(tmp_path, kind):
    watched = watch()
    _, with_it = fitted(tmp_path, watched, averaging(), **AS_THEY_ARE[kind])
    _, without = fitted(tmp_path, averaging(), **AS_THEY_ARE[kind])
    assert len(watched.looks) >= 4
    assert all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True))
    assert watched.diagnosis.verdict is Verdict.ROUND_OFF, watched.diagnosis


def test_a_training_that_goes_on_from_a_checkpoint_is_watched_from_there(tmp_path):
    half, _ = fitted(tmp_path, max_epochs=1)
    half.save_checkpoint(tmp_path / "half.ckpt")
    watched = watch()
    _, with_it = fitted(tmp_path, watched, ckpt_path=tmp_path / "half.ckpt")
    _, without = fitted(tmp_path, ckpt_path=tmp_path / "half.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True))
    assert watched.diagnosis.verdict is Verdict.ROUND_OFF, watched.diagnosis
    assert watched.looks[0].step == len(loader())  # of the whole training, as the candidate's counts are


def test_a_look_gathers_what_the_trainer_gathers(tmp_path):
    watched = watch(updates=1)
    trainer, _ = fitted(tmp_path, watched, accumulate_grad_batches=4)  # of 6 batches: 2 updates an epoch
    assert [look.step for look in watched.looks] == [0, 1, 2, 3, 4][: trainer.global_step + 1]
    assert watched.diagnosis.verdict is Verdict.ROUND_OFF, watched.diagnosis


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_a_look_clips_as_the_trainer_does(tmp_path, algorithm):
    moved = {}
    for clip in (None, 1e-12):
        watched = watch(updates=4)
        fitted(tmp_path, watched, max_steps=1, gradient_clip_val=clip, gradient_clip_algorithm=algorithm)
        sizes = [row["gradient_distance/candidate.float32"] for row in watched.looks[0].diagnosis.curves]
        moved[clip] = sizes
    assert moved[None][0] == moved[1e-12][0]
    assert moved[None][1:] != moved[1e-12][1:]


def test_a_late_fault_has_its_place_and_its_step(tmp_path):
    class Count(lightning.Callback):
        now = 0

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            self.now = trainer.global_step

    count = Count()
    watched = driftlab.lightning.Watch(lambda m: rewrite(m, lambda: count.now >= 5), budget=1e9, updates=2)
    fitted(tmp_path, count, watched)
    found = watched.diagnosis
    assert found.verdict is Verdict.BUG
    assert (found.where.module, found.where.pass_) == ("module.net.0", "forward")
    assert found.where.step == next(look.step for look in watched.looks if look.step >= 5)


def test_page_and_distances_lie_with_the_trainers_logs(tmp_path):
    logger, watched = CSVLogger(tmp_path), watch()
    trainer, _ = fitted(tmp_path, watched, logger=logger)
    assert (tmp_path / trainer.log_dir / "report.html").read_text().count("round_off")
    logger.save()
    with open(f"{trainer.log_dir}/metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row.get("local/weight_distance/candidate.float64")]
    assert len(rows) == len(watched.looks)
    assert all(0 <= float(row["local/weight_distance/candidate.float64"]) < 1e-12 for row in rows)


def test_a_module_that_steps_its_own_optimizers_is_refused(tmp_path):
    class Manual(Own):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    trainer = lightning.Trainer(
        accelerator="cpu",
        default_root_dir=tmp_path,
        callbacks=[watch()],
        logger=False,
        max_steps=1,
        **OPTIONS,
    )
    with pytest.raises(DiagnoseError, match=r"driftlab\.watching"):
        trainer.fit(Manual(), loader())


class Annealed(Own):
    """A term of its loss grows with ``global_step``, and stops growing; another comes in the second epoch."""

    late, cap, epoch = 0, 1.0, 1

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self.net(x)
        weight = min(self.cap, max(0, self.global_step - self.late) / 8)
        weight += 0.1 * (self.current_epoch >= self.epoch) + 0.0 * self.trainer.max_epochs
        return F.cross_entropy(out, y) + weight * out.square().mean()


def otherwise(**settings):
    def rewrite_it(module):
        vars(module).update(settings)
        return rewrite(module)

    return rewrite_it


@pytest.mark.parametrize(
    ("settings", "verdict", "since"),
    [
        ({}, Verdict.ROUND_OFF, None),
        ({"late": 1}, Verdict.BUG, 1),
        ({"cap": 9.0}, Verdict.BUG, 9),
        ({"epoch": 2}, Verdict.BUG, 6),
    ],
    ids=["right", "one step late", "without its cap", "an epoch late"],
)
def test_a_schedule_by_the_trainers_steps_is_where_the_training_is(tmp_path, settings, verdict, since):
    watched = driftlab.lightning.Watch(otherwise(**settings), budget=1e9, updates=2)
    fitted(tmp_path, watched, module=Annealed())
    assert watched.diagnosis.verdict is verdict, watched.diagnosis
    if since:
        before = [look for look in watched.looks if look.step + 2 < since]
        assert all(look.diagnosis.verdict is Verdict.ROUND_OFF for look in before)
        first = next(look for look in watched.looks if look.diagnosis.verdict is Verdict.BUG)
        assert first.step <= since + 3


class Counted(Annealed):
    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        weight = min(self.cap, max(0, self.global_step - self.late) / 8)
        return F.cross_entropy(out, batch[1]) + weight * out.square().mean()


@pytest.mark.parametrize("gathers", [1, 2])
def test_diagnose_counts_the_updates_itself(gathers):
    right = driftlab.diagnose(Counted(), rewrite, loader(), steps=4, accumulate=gathers)
    assert right.verdict is Verdict.ROUND_OFF
    found = driftlab.diagnose(Counted(), otherwise(late=2), loader(), steps=4, accumulate=gathers)
    assert found.verdict is Verdict.BUG
    assert found.where.step == 1


class Decays(Own):
    """Weights of two dimensions decay, others do not."""

    def configure_optimizers(self):
        groups = {True: [], False: []}
        for parameter in self.parameters():
            groups[parameter.dim() > 1].append(parameter)
        total = self.trainer.estimated_stepping_batches
        return torch.optim.AdamW(
            [{"params": groups[True], "weight_decay": 0.1 / total}, {"params": groups[False]}],
            lr=1e-3,
            weight_decay=0,
        )


def with_a_bias_of_two_dimensions(module):
    layer = module.net[3]
    bias = layer.bias.detach().clone()
    del layer.bias
    layer.bias = torch.nn.Parameter(bias[None])
    module.fold = lambda tensors: {
        n: t.reshape(-1) if n == "module.net.3.bias" else t for n, t in tensors.items()
    }
    return module


def test_what_the_rewritten_module_configures_is_compared(tmp_path):
    wrong = driftlab.lightning.Watch(
        with_a_bias_of_two_dimensions, fold=with_a_bias_of_two_dimensions(Decays()).fold
    )
    fitted(tmp_path, wrong, module=Decays(), max_steps=2)
    assert wrong.diagnosis.verdict is Verdict.BUG
    assert "weight_decay" in wrong.diagnosis.headline
    right = driftlab.lightning.Watch(rewrite)
    fitted(tmp_path, right, module=Decays(), max_steps=2)
    assert right.diagnosis.verdict is Verdict.ROUND_OFF


class Once(Own):
    """Its optimizer can be made in the training alone."""

    made = 0

    def configure_optimizers(self):
        Once.made += 1
        if Once.made > 1:
            raise RuntimeError("made already")
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_an_optimizer_that_is_not_compared_is_said(tmp_path):
    watched = watch()
    fitted(tmp_path, watched, module=Once(), max_steps=2)
    assert watched.diagnosis.verdict is Verdict.ROUND_OFF
    assert "made already" in watched.diagnosis.headline
    assert "so it was not compared" in watched.diagnosis.headline
