"""The nodes of the cost model, with the numbers of their data sheets."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """A node, and the shares of its data sheet that we assume to reach. None of them was measured."""

    gpus_per_node: int
    memory_gib: float
    """Per GPU, as the driver reports it."""
    bf16_tflops: float
    """Dense, data sheet."""
    memory_gb_s: float
    link_gb_s: float
    """Per GPU and direction, inside the node."""
    network_gb_s: float
    """Per GPU and direction, between nodes."""
    train_share: float = 0.40
    """Share of bf16_tflops reached in forward and backward of long packed batches."""
    prefill_share: float = 0.50
    memory_share: float = 0.60
    """Share of memory_gb_s reached while decoding."""
    link_share: float = 0.70
    overlap: float = 0.80
    """Share of the collectives' time that hides behind compute, while there is enough of it."""
    step_overhead_ms: float = 6.0
    """Overhead of one engine step: Python and kernel launches (eager)."""
    overhead_ms_per_sequence: float = 0.03
    reserved_gib: float = 1.0
    """CUDA context, NCCL buffers, fragmentation."""


# Hardware(gpus_per_node, memory_gib, bf16_tflops, memory_gb_s, link_gb_s, network_gb_s)
HARDWARE = {
    "1xRTX4080-16GB": Hardware(1, 15.6, 97, 717, 25, 25),
    "1xRTX4090-24GB": Hardware(1, 23.5, 165, 1008, 25, 25),
    "1xH100-80GB": Hardware(1, 79.1, 989, 3350, 450, 50),
    "8xH100-80GB": Hardware(8, 79.1, 989, 3350, 450, 50),
    "8xH200-141GB": Hardware(8, 139.7, 989, 4800, 450, 50),
    "8xA100-80GB": Hardware(8, 79.1, 312, 2039, 300, 25),
}
