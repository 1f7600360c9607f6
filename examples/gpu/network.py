"""A small convolutional network for a GPU, or for the CPU where there is none."""

import torch

from clipper_container.gpu import GpuModel

torch.manual_seed(1)
network = torch.nn.Sequential(
    torch.nn.Conv2d(3, 32, 3, padding=1),
    torch.nn.ReLU(),
    torch.nn.Conv2d(32, 64, 3, stride=2, padding=1),
    torch.nn.ReLU(),
    torch.nn.AdaptiveAvgPool2d(1),
    torch.nn.Flatten(),
    torch.nn.Linear(64, 10),
)
model = GpuModel(network, input="f32[3,32,32]", dtype="bf16", batch_max=64)
