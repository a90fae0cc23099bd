"""Networks of images that no kernel and no estimate was made for, in plain PyTorch."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.networks import merged, split_heads


def windows(x: Tensor, size: int) -> Tensor:
    """[B, H, W, C] to [B * windows, size * size, C]."""
    b, h, w, c = x.shape
    x = x.view(b, h // size, size, w // size, size, c).transpose(2, 3)
    return x.reshape(-1, size * size, c)


class SwinLayer(nn.Module):
    """Attention within windows, which every other layer shifts; an MLP (Liu et al. 2021)."""

    mask: Tensor | None
    pairs: Tensor

    def __init__(self, width: int, heads: int, side: int, size: int, *, is_shifted: bool) -> None:
        super().__init__()
        self.heads, self.size = heads, min(size, side)
        self.shift = size // 2 if is_shifted and side > size else 0
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.bias = nn.Parameter(torch.randn((2 * self.size - 1) ** 2, heads) * 0.02)
        self.register_buffer("pairs", self._pairs())
        self.register_buffer("mask", self._mask(side) if self.shift else None)

    def _pairs(self) -> Tensor:
        """Which bias two positions of a window have, by their distance."""
        steps = torch.arange(self.size)
        at = torch.stack(torch.meshgrid(steps, steps, indexing="ij")).flatten(1)
        apart = at[:, :, None] - at[:, None, :] + self.size - 1
        return apart[0] * (2 * self.size - 1) + apart[1]

    def _mask(self, side: int) -> Tensor:
        """[windows, 1, T, T]: what a shift has brought together does not attend to each other."""
        regions, bounds = torch.zeros(1, side, side, 1), (0, side - self.size, side - self.shift, side)
        for i, (top, bottom) in enumerate(pairwise(bounds)):
            for j, (left, right) in enumerate(pairwise(bounds)):
                regions[:, top:bottom, left:right] = 3 * i + j
        region = windows(regions, self.size).squeeze(-1)
        return ((region[:, None, :] != region[:, :, None]) * -100.0).unsqueeze(1)

    def _attended(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        if self.shift:
            x = x.roll((-self.shift, -self.shift), (1, 2))
        q, k, v = (split_heads(each, self.heads) for each in self.qkv(windows(x, self.size)).chunk(3, dim=-1))
        tokens = self.size * self.size
        bias = self.bias[self.pairs.flatten()].view(tokens, tokens, -1).permute(2, 0, 1).unsqueeze(0)
        if self.mask is not None:
            bias = (bias + self.mask).repeat(b, 1, 1, 1)
        found = merged(F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(q.shape[0], -1, -1, -1)))
        found = self.proj(found).view(b, h // self.size, w // self.size, self.size, self.size, c)
        found = found.transpose(2, 3).reshape(b, h, w, c)
        result: Tensor = found.roll((self.shift, self.shift), (1, 2)) if self.shift else found
        return result

    def forward(self, x: Tensor) -> Tensor:
        """[B, H, W, C] to the same."""
        x = x + self._attended(self.norm1(x))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class Merging(nn.Module):
    """Four neighbours become one of twice the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.reduce = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, H, W, C] to [B, H / 2, W / 2, 2 C]."""
        corners = [x[:, i::2, j::2] for j in range(2) for i in range(2)]
        result: Tensor = self.reduce(self.norm(torch.cat(corners, dim=-1)))
        return result


class Swin(nn.Module):
    """Patches of 4 x 4, four stages, the mean of what is left, a head."""

    def __init__(self, width: int, depths: tuple[int, ...], side: int = 224, size: int = 7) -> None:
        super().__init__()
        self.patches, self.first_norm = nn.Conv2d(3, width, 4, 4), nn.LayerNorm(width)
        layers: list[nn.Module] = []
        side //= 4
        for stage, depth in enumerate(depths):
            heads = width // 32
            layers += [SwinLayer(width, heads, side, size, is_shifted=i % 2 == 1) for i in range(depth)]
            if stage + 1 < len(depths):
                layers.append(Merging(width))
                width, side = 2 * width, side // 2
        self.layers, self.norm = nn.Sequential(*layers), nn.LayerNorm(width)
        self.head = nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, side, side] to [B, 1000]."""
        x = self.layers(self.first_norm(self.patches(images).permute(0, 2, 3, 1)))
        result: Tensor = self.head(self.norm(x).mean(dim=(1, 2)))
        return result


class ChannelsNorm(nn.Module):
    """LayerNorm over the channels of [B, C, H, W]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] to the same."""
        result: Tensor = self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return result


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution, LayerNorm, an MLP of channels, a gain, the residual (Liu et al. 2022)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = (
            nn.Conv2d(width, width, 7, padding=3, groups=width),
            nn.LayerNorm(width, eps=1e-6),
        )
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gain = nn.Parameter(torch.rand(width))  # in training it begins at 1e-6, and the block with it

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] to the same."""
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        h = self.gain * self.down(F.gelu(self.up(h)))
        result: Tensor = x + h.permute(0, 3, 1, 2)
        return result


class ConvNeXt(nn.Sequential):
    """Patches of 4 x 4, four stages with convolutions of 2 x 2 between them, a head."""

    def __init__(self, widths: tuple[int, ...], depths: tuple[int, ...]) -> None:
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), ChannelsNorm(widths[0])]
        for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            if stage:
                layers += [ChannelsNorm(widths[stage - 1]), nn.Conv2d(widths[stage - 1], width, 2, 2)]
            layers += [ConvNeXtBlock(width) for _ in range(depth)]
        head = [
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.LayerNorm(widths[-1], eps=1e-6),
            nn.Linear(widths[-1], 1000),
        ]
        super().__init__(*layers, *head)


class SegFormerLayer(nn.Module):
    """Attention to a reduced image, an MLP with a depthwise convolution inside (Xie et al. 2021)."""

    def __init__(self, width: int, heads: int, reduced: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.proj = (nn.Linear(width, width) for _ in range(4))
        self.reduce = nn.Conv2d(width, width, reduced, reduced) if reduced > 1 else None
        self.reduced_norm = nn.LayerNorm(width) if reduced > 1 else None
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.depthwise = nn.Conv2d(4 * width, 4 * width, 3, padding=1, groups=4 * width)

    def forward(self, x: Tensor, height: int) -> Tensor:
        """[B, T, width] of an image so high to the same."""
        h = self.norm1(x)
        seen = h
        if self.reduce is not None and self.reduced_norm is not None:
            seen = self.reduced_norm(self.reduce(_image(h, height)).flatten(2).transpose(1, 2))
        q, k, v = (
            split_heads(each(of), self.heads)
            for each, of in ((self.query, h), (self.key, seen), (self.value, seen))
        )
        x = x + self.proj(merged(F.scaled_dot_product_attention(q, k, v)))
        h = self.depthwise(_image(self.up(self.norm2(x)), height)).flatten(2).transpose(1, 2)
        result: Tensor = x + self.down(F.gelu(h))
        return result


def _image(tokens: Tensor, height: int) -> Tensor:
    b, t, c = tokens.shape
    return tokens.transpose(1, 2).reshape(b, c, height, t // height)


class SegFormerStage(nn.Module):
    """Overlapping patches, layers, a norm."""

    def __init__(
        self, given: int, width: int, depth: int, heads: int, reduced: int, *, is_first: bool
    ) -> None:
        super().__init__()
        size, stride = (7, 4) if is_first else (3, 2)
        self.patches = nn.Conv2d(given, width, size, stride, padding=size // 2)
        self.first_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.layers = nn.ModuleList(SegFormerLayer(width, heads, reduced) for _ in range(depth))

    def forward(self, images: Tensor) -> Tensor:
        """[B, given, H, W] to [B, width, H / stride, W / stride]."""
        x = self.patches(images)
        height = x.shape[2]
        x = self.first_norm(x.flatten(2).transpose(1, 2))
        for layer in self.layers:
            x = layer(x, height)
        return _image(self.norm(x), height)


class SegFormer(nn.Module):
    """Four stages; a linear layer for each, all of them at the size of the first; a class for each pixel of it."""

    def __init__(
        self, widths: tuple[int, ...], depths: tuple[int, ...], decoder: int, classes: int = 150
    ) -> None:
        super().__init__()
        head, reductions = widths[0], (8, 4, 2, 1)
        shapes = zip((3, *widths), widths, depths, reductions, strict=False)
        self.stages = nn.ModuleList(
            SegFormerStage(given, width, depth, width // head, reduced, is_first=given == 3)
            for given, width, depth, reduced in shapes
        )
        self.linear = nn.ModuleList(nn.Linear(width, decoder) for width in widths)
        self.fuse, self.norm = nn.Conv2d(4 * decoder, decoder, 1, bias=False), nn.BatchNorm2d(decoder)
        self.classify = nn.Conv2d(decoder, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] to [B, classes, H / 4, W / 4]."""
        found: list[Tensor] = []
        x = images
        for stage, linear in zip(self.stages, self.linear, strict=True):
            x = stage(x)
            height, width = x.shape[2:]
            h = linear(x.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, (height, width))
            size = found[0].shape[2:] if found else h.shape[2:]
            found.append(F.interpolate(h, size, mode="bilinear", align_corners=False))
        result: Tensor = self.classify(F.relu(self.norm(self.fuse(torch.cat(found[::-1], dim=1)))))
        return result
