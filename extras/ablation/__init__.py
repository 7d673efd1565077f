"""Algorithms x seeds at equal budget: train each, evaluate it on held-out questions, put all into one table.

    python -m extras.ablation configs/demo_ablation.yaml

Every run samples the same prompts per step, the same group size and the same number of steps; only the overrides of
ALGORITHMS differ. A run is `torchrun train_rl.py`, then `torchrun evaluate.py`, in DIR/NAME/<algorithm>_seed<k>.
Finished runs are skipped and interrupted ones continued, so the same command goes on where it was stopped.
Writes DIR/NAME/{TABLE.md, table.json, forest.png}; `--report_only True` writes them of what is there.
"""
