r"""Several machines: shard inside a machine, replicate across machines.

The fast links inside a machine carry the shards. The network carries 1/N of the gradients, N being the ranks of a
machine. On each of two machines with 8 devices run::

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint FIRST_MACHINE:29500 \
        examples/several_machines.py

Start it with one process per device, or on the CPU::

    torchrun --standalone --nproc-per-node 4 examples/several_machines.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from shared_parts import loss_of, make_model, run
from torch.distributed.device_mesh import init_device_mesh

from onecopy import ShardedDataParallel, ZeroRedundancyOptimizer


def train(device: torch.device, steps: int = 30) -> list[float]:
    """Train and return the losses of this rank."""
    module = make_model(device)
    # torchrun sets this. Without it, as if the ranks were on two machines.
    ranks_per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size() // 2))
    machines = dist.get_world_size() // ranks_per_machine
    mesh = init_device_mesh(device.type, (machines, ranks_per_machine), mesh_dim_names=("replicate", "shard"))
    group = mesh.get_group("shard")
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, process_group=group, lr=1e-3)
    model = ShardedDataParallel(module, optimizer, mesh=mesh)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step, device)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    run(train)
