"""A small TabNet: attentive steps over tables of a few rows, numbers and categories side by side."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import BatchNorm1d, Linear

SAMPLES, ROWS, COLUMNS, CLASSES, VIRTUAL = 3, 8, 10, 6, 4
CAT_IDXS, CAT_DIMS, CAT_EMB_DIMS = (1, 4, 8), (5, 9, 13), (2, 4, 8)
N_D, N_A, N_STEPS, N_SHARED, N_INDEPENDENT, GAMMA, EPSILON = 14, 11, 3, 2, 2, 1.3, 1e-15


class SparsemaxFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input: Tensor) -> Tensor:
        input = input - input.max(-1, keepdim=True)[0]
        srt = input.sort(-1, descending=True)[0]
        cumsum = srt.cumsum(-1) - 1
        rhos = torch.arange(1, input.shape[-1] + 1, device=input.device, dtype=input.dtype)
        support_size = (rhos * srt > cumsum).sum(-1, keepdim=True)
        tau = cumsum.gather(-1, support_size - 1) / support_size.to(input.dtype)
        output = torch.clamp(input - tau, min=0)
        ctx.save_for_backward(support_size, output)
        return output

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> Tensor:
        support_size, output = ctx.saved_tensors
        grad_input = grad_output.masked_fill(output == 0, 0)
        v_hat = grad_input.sum(-1, keepdim=True) / support_size.to(output.dtype)
        return torch.where(output != 0, grad_input - v_hat, grad_input)


class Sparsemax(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return SparsemaxFunction.apply(input)


class GBN(nn.Module):
    def __init__(self, input_dim: int, virtual_batch_size: int = VIRTUAL, momentum: float = 0.02):
        super().__init__()
        self.virtual_batch_size, self.bn = virtual_batch_size, BatchNorm1d(input_dim, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        chunks = x.chunk(math.ceil(x.shape[0] / self.virtual_batch_size), 0)
        return torch.cat([self.bn(x_) for x_ in chunks], dim=0)


class GLU_Layer(nn.Module):  # noqa: N801
    def __init__(self, input_dim: int, output_dim: int, fc: nn.Module | None = None):
        super().__init__()
        self.output_dim = output_dim
        self.fc = fc or Linear(input_dim, 2 * output_dim, bias=False)
        self.bn = GBN(2 * output_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.fc(x))
        return torch.mul(x[:, : self.output_dim], torch.sigmoid(x[:, self.output_dim :]))


class GLU_Block(nn.Module):  # noqa: N801
    def __init__(self, input_dim: int, output_dim: int, n_glu: int, first: bool, shared_layers=None):
        super().__init__()
        self.first, self.n_glu = first, n_glu
        self.glu_layers = nn.ModuleList()
        for glu_id in range(n_glu):
            fc = shared_layers[glu_id] if shared_layers else None
            self.glu_layers.append(GLU_Layer(output_dim if glu_id else input_dim, output_dim, fc))

    def forward(self, x: Tensor) -> Tensor:
        scale = math.sqrt(0.5)
        if self.first:
            x = self.glu_layers[0](x)
        for glu_id in range(1 if self.first else 0, self.n_glu):
            x = torch.add(x, self.glu_layers[glu_id](x))
            x = x * scale
        return x


class FeatTransformer(nn.Module):
    def __init__(self, input_dim: int, output_dim: int, shared_layers: nn.ModuleList):
        super().__init__()
        self.shared = GLU_Block(input_dim, output_dim, len(shared_layers), True, shared_layers)
        self.specifics = GLU_Block(output_dim, output_dim, N_INDEPENDENT, False)

    def forward(self, x: Tensor) -> Tensor:
        return self.specifics(self.shared(x))


class AttentiveTransformer(nn.Module):
    def __init__(self, input_dim: int, group_dim: int):
        super().__init__()
        self.fc = Linear(input_dim, group_dim, bias=False)
        self.bn = GBN(group_dim)
        self.selector = Sparsemax()

    def forward(self, priors: Tensor, processed_feat: Tensor) -> Tensor:
        x = self.bn(self.fc(processed_feat))
        return self.selector(torch.mul(x, priors))


class TabNetEncoder(nn.Module):
    def __init__(self, input_dim: int, group_attention_matrix: Tensor):
        super().__init__()
        self.register_buffer("group_attention_matrix", group_attention_matrix)
        self.attention_dim, width = len(group_attention_matrix), N_D + N_A
        self.initial_bn = BatchNorm1d(input_dim, momentum=0.01)
        sizes = (input_dim, *[width] * (N_SHARED - 1))
        shared = nn.ModuleList(Linear(size, 2 * width, bias=False) for size in sizes)
        self.initial_splitter = FeatTransformer(input_dim, width, shared)
        self.feat_transformers, self.att_transformers = nn.ModuleList(), nn.ModuleList()
        for _ in range(N_STEPS):
            self.feat_transformers.append(FeatTransformer(input_dim, width, shared))
            self.att_transformers.append(AttentiveTransformer(N_A, self.attention_dim))

    def forward(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        x = self.initial_bn(x)
        prior = x.new_ones(x.shape[0], self.attention_dim)
        m_loss = 0
        att = self.initial_splitter(x)[:, N_D:]
        steps_output = []
        for step in range(N_STEPS):
            mask = self.att_transformers[step](prior, att)
            m_loss = m_loss + torch.mean(torch.sum(torch.mul(mask, torch.log(mask + EPSILON)), dim=1))
            prior = torch.mul(GAMMA - mask, prior)
            masked_x = torch.mul(torch.matmul(mask, self.group_attention_matrix), x)
            out = self.feat_transformers[step](masked_x)
            steps_output.append(F.relu(out[:, :N_D]))
            att = out[:, N_D:]
        return steps_output, m_loss / N_STEPS


class TabNetNoEmbeddings(nn.Module):
    def __init__(self, input_dim: int, output_dim: int, group_attention_matrix: Tensor):
        super().__init__()
        self.encoder = TabNetEncoder(input_dim, group_attention_matrix)
        self.final_mapping = Linear(N_D, output_dim, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        steps_output, m_loss = self.encoder(x)
        return self.final_mapping(torch.sum(torch.stack(steps_output, dim=0), dim=0)), m_loss


class EmbeddingGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = zip(CAT_DIMS, CAT_EMB_DIMS, strict=True)
        self.embeddings = nn.ModuleList(nn.Embedding(*size) for size in sizes)
        widths = [CAT_EMB_DIMS[CAT_IDXS.index(i)] if i in CAT_IDXS else 1 for i in range(COLUMNS)]
        self.post_embed_dim = sum(widths)
        group = [torch.full((1, width), 1 / width) for width in widths]
        self.embedding_group_matrix = torch.block_diag(*group)

    def forward(self, x: Tensor, categories: Tensor) -> Tensor:
        cols, numbers = [], iter(x.split(1, 1))
        for i in range(COLUMNS):
            if i in CAT_IDXS:
                cat = CAT_IDXS.index(i)
                cols.append(self.embeddings[cat](categories[:, cat]))
            else:
                cols.append(next(numbers))
        return torch.cat(cols, dim=1)


class TabNet(nn.Module):
    """Tables [N, R, numbers] and [N, R, categories] -> logits [N, R, classes] and the masks' sparsity."""

    def __init__(self):
        super().__init__()
        self.embedder = EmbeddingGenerator()
        matrix = self.embedder.embedding_group_matrix
        self.tabnet = TabNetNoEmbeddings(self.embedder.post_embed_dim, CLASSES, matrix)
        for module in self.modules():
            if isinstance(module, BatchNorm1d):
                nn.init.uniform_(module.weight, 0.3, 0.7)
                nn.init.normal_(module.bias, 0, 0.2)
                nn.init.normal_(module.running_mean, 0, 0.1)
                nn.init.uniform_(module.running_var, 0.7, 1.3)
            elif isinstance(module, Linear):
                nn.init.normal_(module.weight, 0, math.sqrt(2 / math.sqrt(module.in_features)))

    def forward(self, x: Tensor, categories: Tensor) -> tuple[Tensor, Tensor]:
        out, m_loss = self.tabnet(self.embedder(x.flatten(0, 1), categories.flatten(0, 1)))
        return out.unflatten(0, x.shape[:2]), m_loss


def tables() -> tuple[dict[str, Tensor], Tensor]:
    """Rows of one table are alike; the class follows from three numbers and a category."""
    x = 0.6 * torch.randn(SAMPLES, 1, COLUMNS - 3) + torch.randn(SAMPLES, ROWS, COLUMNS - 3)
    categories = torch.stack([torch.randint(count, (SAMPLES, ROWS)) for count in CAT_DIMS], 2)
    score = x[..., 0] - x[..., 2] * x[..., 5] + 0.4 * categories[..., 1] - 1.6
    return {"x": x, "categories": categories}, (score + CLASSES / 2).clamp(0, CLASSES - 1).long()


def classes_and_sparsity(outputs: tuple[Tensor, Tensor], label: Tensor) -> Tensor:
    """The cross entropy of the rows less a part of the sparsity, by ten."""
    return (F.cross_entropy(outputs[0].flatten(0, 1), label.flatten()) - 0.2 * outputs[1]) / 10
