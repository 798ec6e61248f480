"""A small conformer: what is said in each of the padded frames, a first guess at it, and by whom."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, HIDDEN, TAPS, BLOCKS = 8, 2, 16, 5, 2
BINS, SOUNDS, VOICES = 6, 5, 3


class Front(nn.Module):
    """Frames [N, T, bins] at half the rate: [N, (T + 1) / 2, C]."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(BINS, WIDTH, 3, stride=2, padding=1)
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, frames: Tensor) -> Tensor:
        return self.fc(F.silu(self.conv(frames.transpose(1, 2))).transpose(1, 2))


class Distances(nn.Module):
    """Sines and cosines, by turns, of the distances T - 1, ..., 1 - T."""

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[1]
        away = torch.arange(count - 1, -count, -1).to(x)
        rates = 50.0 ** -(torch.arange(0, WIDTH, 2).to(x) / WIDTH)
        angles = away[:, None] * rates
        return torch.stack([angles.sin(), angles.cos()], 2).flatten(1)


class RelativeAttention(nn.Module):
    """Attention by content and by distance, each with a bias of the queries of its own."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.p = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.by_content = nn.Parameter(0.5 * torch.randn(HEADS, WIDTH // HEADS))
        self.by_place = nn.Parameter(0.5 * torch.randn(HEADS, WIDTH // HEADS))
        self.out = nn.Linear(WIDTH, WIDTH)

    @staticmethod
    def shift(scores: Tensor) -> Tensor:
        """By distance [N, H, T, 2 T - 1] -> by key [N, H, T, T]."""
        count = scores.shape[2]
        padded = F.pad(scores, (1, 0)).flatten(2).unflatten(2, (2 * count, count))
        return padded[:, :, 1:].flatten(2).unflatten(2, (count, 2 * count - 1))[..., :count]

    def forward(self, x: Tensor, distances: Tensor, real: Tensor) -> Tensor:
        x = self.norm(x)
        q, k, v = (f(x).unflatten(2, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        p = self.p(distances).unflatten(1, (HEADS, -1)).transpose(0, 1)
        content = (q + self.by_content[:, None]) @ k.transpose(2, 3)
        place = self.shift((q + self.by_place[:, None]) @ p.transpose(1, 2))
        scores = (content + place) / (WIDTH // HEADS) ** 0.5
        shares = scores.masked_fill(~real[:, None, None], -torch.inf).softmax(3)
        return self.out((shares @ v).transpose(1, 2).flatten(2))


class Convolution(nn.Module):
    """Pointwise, gated, depthwise, normed over the real frames, swish, pointwise."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.enter = nn.Conv1d(WIDTH, 2 * WIDTH, 1)
        self.depthwise = nn.Conv1d(WIDTH, WIDTH, TAPS, padding=TAPS // 2, groups=WIDTH, bias=False)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.leave = nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        gated = F.glu(self.enter(self.norm(x).transpose(1, 2)), 1)
        mixed = self.depthwise(gated * real[:, None]).transpose(1, 2)
        normed = torch.zeros_like(mixed)
        normed[real] = self.batch_norm(mixed[real])
        return self.leave(F.silu(normed).transpose(1, 2)).transpose(1, 2)


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(self.norm(x))))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.feed1, self.feed2 = FeedForward(), FeedForward()
        self.attention, self.conv = RelativeAttention(), Convolution()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, distances: Tensor, real: Tensor) -> Tensor:
        x = x + 0.5 * self.feed1(x)
        x = x + self.attention(x, distances, real)
        x = x + self.conv(x, real)
        return self.norm(x + 0.5 * self.feed2(x))


class Guess(nn.Module):
    """What is said by the layers so far, told to those which follow."""

    def __init__(self):
        super().__init__()
        self.say, self.tell = nn.Linear(WIDTH, SOUNDS), nn.Linear(SOUNDS, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.say(x)
        return x + self.tell(logits.softmax(2)), logits


class Voice(nn.Module):
    """Mean and spread of the real frames -> logits of the voices."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2 * WIDTH, VOICES)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        weights = real[..., None].to(x) / real.sum(1)[:, None, None]
        mean = (weights * x).sum(1)
        spread = (weights * (x - mean[:, None]).square()).sum(1)
        return self.fc(torch.cat([mean, (spread + 1e-5).sqrt()], 1))


class Conformer(nn.Module):
    """Frames [N, T, bins] and how many are real -> logits of sounds at half the rate, and of voices."""

    def __init__(self):
        super().__init__()
        self.front, self.distances = Front(), Distances()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.guess, self.head, self.voice = Guess(), nn.Linear(WIDTH, SOUNDS), Voice()

    def forward(self, frames: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        x = self.front(frames)
        real = torch.arange(x.shape[1], device=x.device) < (lengths[:, None] + 1) // 2
        distances = self.distances(x)
        x, guess = self.guess(self.blocks[0](x, distances, real))
        for block in self.blocks[1:]:
            x = block(x, distances, real)
        sounds = self.head(x) * real[..., None]
        return {"guess": guess * real[..., None], "sounds": sounds, "voice": self.voice(x, real)}


def speech() -> tuple[dict[str, Tensor], Tensor]:
    """Sounds of two frames each, in a voice, with noise; the targets are the sounds, then the voice."""
    lengths, voices = torch.randint(4, 14, (10,)), torch.randint(VOICES, (10,))
    sounds, bins = torch.randint(SOUNDS, (10, 7)), torch.arange(BINS)
    frames = torch.cos((sounds[..., None] + 1) * bins / 2) + 0.4 * torch.sin(voices[:, None, None] + bins)
    frames = frames.repeat_interleave(2, 1)[:, :13] + 0.3 * torch.randn(10, 13, BINS)
    frames = frames * (torch.arange(13) < lengths[:, None])[..., None]
    filler = torch.arange(7) >= (lengths[:, None] + 1) // 2
    target = torch.cat([sounds.masked_fill(filler, -100), voices[:, None]], 1)
    return {"frames": frames, "lengths": lengths}, target


def said(outputs: dict[str, Tensor], target: Tensor) -> Tensor:
    sounds, guess = (
        F.cross_entropy(outputs[name].flatten(0, 1), target[:, :-1].flatten()) for name in ("sounds", "guess")
    )
    return sounds + 0.3 * guess + 0.3 * F.cross_entropy(outputs["voice"], target[:, -1])
