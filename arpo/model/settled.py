"""The transformers config of a model folder, settled so that the logits of a row depend on this row alone.

Two things make the same row come out differently in another forward pass: RoPE that is chosen by the longest row
computed together, and dropout. The folder's own config.json is never changed, so an export has it as it was.
"""

from __future__ import annotations

from typing import Any

from arpo.config.named import brief
from arpo.errors import UserError


def settled_config(path: str, *, max_model_len: int = 0) -> Any:
    """Return the folder's config with RoPE fixed for `max_model_len` and all dropout off.

    max_model_len: the longest row of the run, which vLLM is told as well; 0: vLLM's own default. Raises UserError for
    rows that dynamic RoPE would change.
    """
    config = read_model_config(path)
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in [rope] if "rope_type" in rope else rope.values():  # or one for each kind of layer
        if isinstance(parameters, dict):
            _fix_rope(parameters, text, path=path, max_model_len=max_model_len)
    for part in {id(config): config, id(text): text}.values():
        for name, value in vars(part).items():
            if "drop" in name and isinstance(value, float):  # attention_dropout, resid_pdrop, layerdrop, ...
                setattr(part, name, 0.0)
    return config


def read_model_config(path: str) -> Any:
    """Return the config of a model's folder. Raises UserError where transformers cannot make sense of it."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
        raise UserError(f"model.path={path}: config.json cannot be used ({brief(error)}); copy it again") from None


def _fix_rope(parameters: dict[str, Any], text: Any, *, path: str, max_model_len: int) -> None:
    """Make frequencies that grow with the longest row constant, as vLLM makes them at its start."""
    if parameters.get("rope_type") == "longrope":
        original = parameters.get("original_max_position_embeddings") or text.max_position_embeddings
        used, unused = ("long", "short") if max_model_len > original else ("short", "long")
        parameters[f"{unused}_factor"] = parameters[f"{used}_factor"]
        if scale := parameters.get(f"{used}_mscale"):
            parameters["attention_factor"] = scale
    elif parameters.get("rope_type") == "dynamic":
        limit = text.max_position_embeddings
        trained = parameters.get("max_trained_positions", limit)
        if max_model_len > limit or trained != limit:
            raise UserError(
                f"model.path={path}: its dynamic RoPE changes with the length of a row beyond {min(trained, limit)} "
                f"tokens, and rows of this run may have {max_model_len or limit}; shorten them, or set a fixed "
                "rope_type (yarn, linear) in config.json"
            )
        if alpha := parameters.get("alpha"):  # Hunyuan's: a constant base
            dim = text.head_dim
            parameters["rope_theta"] *= alpha ** (dim / (dim - 2))
        parameters["rope_type"] = "default"  # which it is for rows within the limit
