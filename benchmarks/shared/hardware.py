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


HARDWARE = {
    "1xRTX4080-16GB": Hardware(1, memory_gib=15.6, bf16_tflops=97, memory_gb_s=717, link_gb_s=25, network_gb_s=25),
    "1xRTX4090-24GB": Hardware(1, memory_gib=23.5, bf16_tflops=165, memory_gb_s=1008, link_gb_s=25, network_gb_s=25),
    "1xH100-80GB": Hardware(1, memory_gib=79.1, bf16_tflops=989, memory_gb_s=3350, link_gb_s=450, network_gb_s=50),
    "8xH100-80GB": Hardware(8, memory_gib=79.1, bf16_tflops=989, memory_gb_s=3350, link_gb_s=450, network_gb_s=50),
    "8xH200-141GB": Hardware(8, memory_gib=139.7, bf16_tflops=989, memory_gb_s=4800, link_gb_s=450, network_gb_s=50),
    "8xA100-80GB": Hardware(8, memory_gib=79.1, bf16_tflops=312, memory_gb_s=2039, link_gb_s=300, network_gb_s=25),
}
