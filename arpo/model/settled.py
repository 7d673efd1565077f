"""The transformers config of a model folder, changed so that the logits of a row depend only on this row.

Two things could change the logits of the same row in another forward pass: dropout, and a RoPE that depends on the
longest row in the batch. The folder's config.json is not changed, so an export has it as it was.
"""

from __future__ import annotations

from typing import Any

from arpo.config.named import brief
from arpo.errors import UserError


def settled_config(path: str, *, max_model_len: int = 0) -> Any:
    """Return the folder's config with RoPE fixed for `max_model_len`, and without dropout.

    max_model_len: tokens of the run's longest row, the same number as vLLM gets; 0 = vLLM's default. Raises UserError
    if dynamic RoPE would depend on the length of the run's rows.
    """
    config = read_model_config(path)
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    # Either the parameters of all layers, or a dict of them for each kind of layer.
    for parameters in [rope] if "rope_type" in rope else rope.values():
        if isinstance(parameters, dict):
            _fix_rope(parameters, text, path=path, max_model_len=max_model_len)
    for part in {id(config): config, id(text): text}.values():
        for name, value in vars(part).items():
            if "drop" in name and isinstance(value, float):  # attention_dropout, resid_pdrop, layerdrop, ...
                setattr(part, name, 0.0)
    return config


def read_model_config(path: str) -> Any:
    """Return the config of a model's folder. Raises UserError if transformers cannot read it."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
        raise UserError(f"model.path={path}: config.json cannot be used ({brief(error)}); copy it again") from None


def _fix_rope(parameters: dict[str, Any], text: Any, *, path: str, max_model_len: int) -> None:
    """Make frequencies constant that would depend on the longest row, with the values that vLLM uses."""
    if parameters.get("rope_type") == "longrope":
        original = parameters.get("original_max_position_embeddings") or text.max_position_embeddings
        is_long = max_model_len > original
        used = "long" if is_long else "short"
        unused = "short" if is_long else "long"
        # transformers picks one of the two factors by the length of the rows; now both are the same.
        parameters[f"{unused}_factor"] = parameters[f"{used}_factor"]
        scale = parameters.get(f"{used}_mscale")
        if scale:
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
        alpha = parameters.get("alpha")
        if alpha:  # Hunyuan: the base is constant
            dim = text.head_dim
            parameters["rope_theta"] *= alpha ** (dim / (dim - 2))
        parameters["rope_type"] = "default"  # the same as dynamic for rows within the limit
