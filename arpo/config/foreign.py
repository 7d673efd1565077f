"""What TRL and verl call our settings, so that a flag of theirs is answered with ours."""

from __future__ import annotations

OURS = {
    "adv_estimator": "advantage.kind",
    "beta": "loss.kl_coefficient",
    "clip_ratio": "loss.clip_low",
    "clip_ratio_high": "loss.clip_high",
    "clip_ratio_low": "loss.clip_low",
    "dataset_name": "data.train",
    "entropy_coeff": "loss.entropy_coefficient",
    "epsilon": "loss.clip_low",
    "epsilon_high": "loss.clip_high",
    "eval_steps": "run.validate_every",
    "experiment_name": "run.name",
    "kl_loss_coef": "loss.kl_coefficient",
    "learning_rate": "optim.lr",
    "lora_r": "model.lora_rank",
    "loss_agg_mode": "loss.aggregation",
    "max_completion_length": "rollout.max_response_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_response_length": "rollout.max_response_tokens",
    "max_steps": "run.num_steps",
    "model_name_or_path": "model.path",
    "n": "rollout.group_size",
    "num_generations": "rollout.group_size",
    "num_iterations": "update.num_epochs",
    "num_train_epochs": "run.num_epochs",
    "optimizer_offload": "optim.offload",
    "output_dir": "run.dir",
    "per_device_train_batch_size": "data.num_prompts_per_step",
    "ppo_epochs": "update.num_epochs",
    "ppo_mini_batch_size": "update.num_prompts_per_minibatch",
    "report_to": "run.trackers",
    "reward_funcs": "reward.file",
    "save_freq": "run.save_every",
    "save_steps": "run.save_every",
    "tensor_model_parallel_size": "engine.tensor_parallel",
    "test_freq": "run.validate_every",
    "total_epochs": "run.num_epochs",
    "train_batch_size": "data.num_prompts_per_step",
    "train_files": "data.train",
    "val_files": "data.valid",
    "vllm_gpu_memory_utilization": "engine.gpu_memory_utilization",
}
"""Last part of their key -> our key."""
SECTIONS = {"eval": "evaluate.py", "ablation": "extras.ablation", "critic": "train_rl.py", "rollout": "train_rl.py"}
"""Section of a file -> the script that reads it."""
