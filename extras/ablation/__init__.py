"""Algorithms x seeds at equal budget: train each, evaluate it on held-out questions, put all into one table.

    python -m extras.ablation configs/demo_ablation.yaml

All runs have the same prompts per step, group size and number of steps; only the overrides of ALGORITHMS differ. A run
is `torchrun train_rl.py`, then `torchrun evaluate.py`, in DIR/NAME/<algorithm>_seed<k>. Finished runs are skipped and
interrupted runs continued, so after a stop the same command continues. Writes DIR/NAME/{TABLE.md, table.json,
forest.png}; with `--report_only True` from the finished runs, without running anything.
"""
