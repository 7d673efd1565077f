"""What holds of the format of each form whose calls the chat template writes."""

from arpo.protocol import form_of
from arpo.rewards import score


def check_well_formed(form: str, segments: list[tuple[str, bool]]) -> None:
    """It is scored by its last turn, whose answer is 4."""
    rules = form_of(form).rules
    assert rules.format_error(segments) == "" and rules.extract_answer(segments) == ("4", "")
    result = score(text_of(segments), ["4"], "math", segments=segments, bonus_tools=(), form=form)
    assert (result.total, result.reason) == (1.0, "")


def check_defect(form: str, segments: list[tuple[str, bool]], reason: str) -> None:
    """It costs the reward, and has a name."""
    assert form_of(form).rules.format_error(segments) == reason
    result = score(text_of(segments), ["4"], "math", segments=segments, form=form)
    assert (result.total, result.reason, result.parts["format"]) == (-1.0, reason, 0.0)


def text_of(segments: list[tuple[str, bool]]) -> str:
    return "".join(text for text, _ in segments)
