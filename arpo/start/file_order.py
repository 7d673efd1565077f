"""Messages about config files in the wrong order. Later files win, so a model's file comes first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence


def overridden_recipes(files: Sequence[tuple[str, Mapping[str, list[str]]]]) -> Iterator[str]:
    """Yield a warning for each file without a model, if a later model's file changes settings of this file.

    files: name and settings (key -> values) of each file, in the given order. Example: after `forks.yaml
    qwen2.5_7b.yaml` a run has the 7B file's number of roots. The run then has a different algorithm, without any error.
    """
    for number, (recipe, settings) in enumerate(files):
        if "model.path" in settings:
            continue
        for later, others in files[number + 1 :]:
            changed = [key for key, values in settings.items() if others.get(key, values) != values]
            if changed and "model.path" in others:
                yield (
                    f"warning: {later} comes after {recipe} and overrides its {', '.join(changed)}; "
                    f"unless that is meant, put the model's file first: {later} {recipe}"
                )


def swap_hint(off: str, on: str) -> str:
    """Return the advice to swap two files. `off` comes first, and switches off the settings of `on`."""
    return f"; {off} says so, and comes before: put the model's file first ({on} {off})"
