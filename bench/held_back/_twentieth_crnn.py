"""A small CRNN: a convolutional stem makes columns of an image of text, two memories read both ways."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

HIGH, WIDE, CLASSES, ROWS, LONGEST, HIDDEN = 16, 44, 9, 4, 5, 16
GLYPHS = torch.rand(CLASSES, 11, 6, generator=torch.Generator().manual_seed(20)) > 0.5


class BidirectionalLSTM(nn.Module):
    """[T, N, in] -> [T, N, out]; each row is read both ways as far as its length."""

    def __init__(self, n_in: int, n_hidden: int, n_out: int):
        super().__init__()
        self.rnn = nn.LSTM(n_in, n_hidden, bidirectional=True)
        self.embedding = nn.Linear(n_hidden * 2, n_out)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), enforce_sorted=False)
        recurrent, _ = pad_packed_sequence(self.rnn(packed)[0], total_length=x.shape[0])
        steps, rows, width = recurrent.size()
        return self.embedding(recurrent.view(steps * rows, width)).view(steps, rows, -1)


class CRNN(nn.Module):
    """Images [N, C, H, W] and their widths -> log-probabilities [T, N, classes], columns [T, N, D]."""

    def __init__(self, nc: int = 1, nclass: int = CLASSES, nh: int = HIDDEN):
        super().__init__()
        self.cnn = nn.Sequential()
        sizes, kernels, paddings = (nc, 8, 12, 16, 16, 16), (3, 3, 3, 3, 2), (1, 1, 1, 1, 0)

        def conv_relu(i: int, batch_normalization: bool = False) -> None:
            conv = nn.Conv2d(sizes[i], sizes[i + 1], kernels[i], 1, paddings[i])
            self.cnn.add_module(f"conv{i}", conv)
            if batch_normalization:
                self.cnn.add_module(f"batchnorm{i}", nn.BatchNorm2d(sizes[i + 1]))
            self.cnn.add_module(f"relu{i}", nn.LeakyReLU(0.2))

        conv_relu(0)
        self.cnn.add_module("pooling0", nn.MaxPool2d(2, 2))
        conv_relu(1)
        self.cnn.add_module("pooling1", nn.MaxPool2d((2, 2), (2, 1), (0, 1)))
        conv_relu(2, True)
        conv_relu(3)
        self.cnn.add_module("pooling2", nn.MaxPool2d((2, 2), (2, 1), (0, 1)))
        conv_relu(4, True)
        self.rnn = nn.ModuleList([BidirectionalLSTM(sizes[-1], nh, nh), BidirectionalLSTM(nh, nh, nclass)])
        self.apply(varied)

    def forward(self, image: Tensor, widths: Tensor) -> dict[str, Tensor]:
        columns = self.cnn(image).squeeze(2).permute(2, 0, 1)
        lengths, output = widths // 2 + 1, columns
        for layer in self.rnn:
            output = layer(output, lengths)
        return {"log_probs": F.log_softmax(output, dim=2), "columns": columns}


def varied(module: nn.Module) -> None:
    """Weights such that each part matters."""
    if isinstance(module, nn.BatchNorm2d):
        nn.init.uniform_(module.weight, 0.6, 1.4)
        nn.init.normal_(module.bias, std=0.3)
        nn.init.normal_(module.running_mean, std=0.2)
        nn.init.uniform_(module.running_var, 0.5, 1.5)
    elif isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, a=0.2)
        nn.init.normal_(module.bias, std=0.3)
    elif isinstance(module, nn.LSTM):
        for weight in module.parameters():
            nn.init.normal_(weight, std=0.35)
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.35)
        nn.init.normal_(module.bias, std=0.3)


def lines() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two to five glyphs at uneven heights and gaps, the first line as wide as the sheet, under noise."""
    counts = torch.cat([torch.tensor([LONGEST]), torch.randint(2, LONGEST, (ROWS - 1,))])
    labels = torch.randint(1, CLASSES, (ROWS, LONGEST)) * (torch.arange(LONGEST) < counts[:, None])
    image, widths = 0.3 * torch.randn(ROWS, 1, HIGH, WIDE), torch.full((ROWS,), WIDE)
    for row, count in enumerate(counts.tolist()):
        left = 1
        for label in labels[row, :count]:
            left, top = left + int(torch.randint(3, ())), int(torch.randint(HIGH - 10, ()))
            image[row, 0, top : top + 11, left : left + 6] += GLYPHS[label]
            left += 6
        if row:
            widths[row] = left + 2
    target = {"labels": labels, "target_lengths": counts, "input_lengths": widths // 2 + 1}
    return {"image": image, "widths": widths}, target


def ctc(outputs: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    lengths = target["input_lengths"], target["target_lengths"]
    return 0.3 * F.ctc_loss(outputs["log_probs"], target["labels"], *lengths)
