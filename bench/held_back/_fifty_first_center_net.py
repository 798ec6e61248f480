"""A small CenterNet: a residual network with deconvolutions, three heads, and losses of objects as points."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, HIGH, WIDE, STRIDE, PICTURES, OBJECTS = 3, 48, 64, 4, 3, 6
PLANES, DECONVS, HEAD_CONV = (8, 12, 20), (16, 14), 10
HEADS = {"hm": CLASSES, "wh": 2, "reg": 2}


class BasicBlock(nn.Module):
    def __init__(self, inplanes: int, planes: int, stride: int = 1, downsample: nn.Module | None = None):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        residual = x if self.downsample is None else self.downsample(x)
        return self.relu(out + residual)


class PoseResNet(nn.Module):
    """[N, 3, H, W] -> maps of a quarter of the size by head."""

    def __init__(self):
        super().__init__()
        self.inplanes = PLANES[0]
        self.conv1 = nn.Conv2d(3, self.inplanes, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(self.inplanes)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = self._make_layer(PLANES[0], 1)
        self.layer2 = self._make_layer(PLANES[1], 2)
        self.layer3 = self._make_layer(PLANES[2], 2)
        self.deconv_layers = self._make_deconv_layer()
        for head, count in HEADS.items():
            first = nn.Conv2d(self.inplanes, HEAD_CONV, 3, padding=1)
            setattr(self, head, nn.Sequential(first, nn.ReLU(), nn.Conv2d(HEAD_CONV, count, 1)))

    def _make_layer(self, planes: int, stride: int) -> nn.Sequential:
        downsample = None
        if stride != 1:
            conv = nn.Conv2d(self.inplanes, planes, 1, stride, bias=False)
            downsample = nn.Sequential(conv, nn.BatchNorm2d(planes))
        first = BasicBlock(self.inplanes, planes, stride, downsample)
        self.inplanes = planes
        return nn.Sequential(first, BasicBlock(planes, planes))

    def _make_deconv_layer(self) -> nn.Sequential:
        layers = []
        for planes in DECONVS:
            layers += [nn.ConvTranspose2d(self.inplanes, planes, 4, 2, 1, bias=False)]
            layers += [nn.BatchNorm2d(planes), nn.ReLU()]
            self.inplanes = planes
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer3(self.layer2(self.layer1(x)))
        x = self.deconv_layers(x)
        return {head: getattr(self, head)(x) for head in HEADS}


class FocalLoss(nn.Module):
    def forward(self, pred: Tensor, gt: Tensor) -> Tensor:
        pos_inds, neg_inds = gt.eq(1).to(pred), gt.lt(1).to(pred)
        neg_weights = torch.pow(1 - gt, 4)
        pos_loss = torch.log(pred) * torch.pow(1 - pred, 2) * pos_inds
        neg_loss = torch.log(1 - pred) * torch.pow(pred, 2) * neg_weights * neg_inds
        num_pos = pos_inds.sum()
        if num_pos == 0:
            return -neg_loss.sum()
        return -(pos_loss.sum() + neg_loss.sum()) / num_pos


class RegL1Loss(nn.Module):
    def forward(self, output: Tensor, mask: Tensor, ind: Tensor, target: Tensor) -> Tensor:
        feat = output.permute(0, 2, 3, 1).flatten(1, 2)
        pred = feat.gather(1, ind.unsqueeze(2).expand(-1, -1, feat.shape[2]))
        mask = mask.unsqueeze(2).expand_as(pred).to(pred)
        return F.l1_loss(pred * mask, target * mask, reduction="sum") / (mask.sum() + 1e-4)


class CtdetLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.crit, self.crit_reg, self.crit_wh = FocalLoss(), RegL1Loss(), RegL1Loss()
        self.hm_weight, self.wh_weight, self.off_weight = 1.0, 0.1, 1.0

    def forward(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> dict[str, Tensor]:
        heat = torch.clamp(output["hm"].sigmoid(), min=1e-4, max=1 - 1e-4)
        hm_loss = self.crit(heat, batch["hm"])
        wh_loss = self.crit_wh(output["wh"], batch["reg_mask"], batch["ind"], batch["wh"])
        off_loss = self.crit_reg(output["reg"], batch["reg_mask"], batch["ind"], batch["reg"])
        loss = self.hm_weight * hm_loss + self.wh_weight * wh_loss + self.off_weight * off_loss
        return {"loss": loss, "hm_loss": hm_loss, "wh_loss": wh_loss, "off_loss": off_loss}


def ctdet_decode(hm: Tensor, wh: Tensor, reg: Tensor) -> dict[str, Tensor]:
    """The heat of the peaks, and the box of each position as its left, top, right and bottom."""
    heat = hm.sigmoid()
    keep = F.max_pool2d(heat, 3, 1, 1) == heat
    xs = torch.arange(hm.shape[3]).to(hm) + reg[:, 0]
    ys = torch.arange(hm.shape[2]).to(hm)[:, None] + reg[:, 1]
    w, h = wh[:, 0], wh[:, 1]
    boxes = torch.stack([xs - w / 2, ys - h / 2, xs + w / 2, ys + h / 2], 3)
    return {"scores": heat * keep.to(heat), "bboxes": boxes.flatten(1, 2)}


class ModelWithLoss(nn.Module):
    """Pictures and their objects -> maps and losses; in evaluation the peaks and the boxes too."""

    def __init__(self):
        super().__init__()
        self.model, self.loss = PoseResNet(), CtdetLoss()
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.weight, 0.9, 0.2), nn.init.normal_(module.bias, std=0.2)
                nn.init.normal_(module.running_mean, std=0.2), nn.init.uniform_(module.running_var, 0.6, 1.5)
            elif isinstance(module, nn.ConvTranspose2d):
                tent = torch.tensor([0.25, 0.75, 0.75, 0.25])
                random = torch.randn_like(module.weight) * 1.5 / math.sqrt(module.in_channels)
                module.weight.data = random * (torch.outer(tent, tent) + 0.3 * torch.rand_like(random))
        nn.init.normal_(self.model.hm[2].bias, -2.19, 0.2)

    def forward(self, input: Tensor, **batch: Tensor) -> dict[str, Tensor]:
        outputs = self.model(input)
        result = {**outputs, **self.loss(outputs, batch)}
        return result if self.training else {**result, **ctdet_decode(**outputs)}


def scenes() -> tuple[dict[str, Tensor], Tensor]:
    """Pictures of a few coloured rectangles, and their centres, sizes and offsets in slots with a mask."""
    n, high, wide = PICTURES, HIGH // STRIDE, WIDE // STRIDE
    x, hm = 0.3 * torch.randn(n, 3, HIGH, WIDE), torch.zeros(n, CLASSES, high, wide)
    ind, mask = torch.zeros(n, OBJECTS, dtype=torch.long), torch.zeros(n, OBJECTS, dtype=torch.bool)
    wh, reg, label = torch.zeros(n, OBJECTS, 2), torch.zeros(n, OBJECTS, 2), torch.zeros(n, OBJECTS)
    for i in range(n):
        for k in range(int(torch.randint(2, OBJECTS, ()))):
            kind, size = int(torch.randint(CLASSES, ())), 2 + torch.tensor([5.0, 3.0]) * torch.rand(2)
            center = size / 2 + (torch.tensor([wide, high]) - size) * torch.rand(2)
            (left, top), (right, low) = ((STRIDE * (center + s * size / 2)).long().tolist() for s in (-1, 1))
            x[i, :, top:low, left:right] += torch.cos(2.1 * (torch.arange(3) - kind))[:, None, None]
            cx, cy = center.long().tolist()
            across, down = (torch.arange(wide) - cx) / size[0], (torch.arange(high)[:, None] - cy) / size[1]
            hm[i, kind] = torch.maximum(hm[i, kind], torch.exp(-8 * (across**2 + down**2)))
            ind[i, k], mask[i, k], label[i, k] = cy * wide + cx, True, kind
            wh[i, k], reg[i, k] = size, center - center.floor()
    return {"input": x, "hm": hm, "reg_mask": mask, "ind": ind, "wh": wh, "reg": reg}, label


def own_loss(outputs: dict[str, Tensor], label: Tensor) -> Tensor:
    """A quarter of the loss that the network gives itself."""
    return outputs["loss"] / 4
