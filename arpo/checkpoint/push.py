"""Upload of a finished model to the Hub, with its card.

What was interrupted goes on with the same command: the Hub keeps each file that has arrived whole, and is not sent it
again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from arpo.checkpoint.card import find_source, write_card
from arpo.data.hub_remote import said
from arpo.errors import UserError

WANTED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "README.md")
"""Patterns of the files of a model folder that are uploaded."""


def push(path: Path, repo: str, *, private: bool, dry_run: bool, say: Callable[[str], None] = print) -> Path:
    """Write the card of the model in a run, or in a model folder, and upload both to OWNER/NAME. Return the card.

    dry_run: only write the card. private: where the repository is made now. Raises UserError.
    """
    from huggingface_hub import HfApi, errors, get_token
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except errors.HFValidationError:
        raise UserError(f"{repo}: not a name of the Hub; it is OWNER/NAME") from None
    if repo.count("/") != 1:
        raise UserError(f"{repo}: not a name of the Hub; it is OWNER/NAME")
    source = find_source(path)
    try:
        card = write_card(source)
    except OSError as error:
        raise UserError(f"{source.folder}: cannot write the card ({error.strerror})") from None
    say(f"card: {card}")
    if dry_run:
        return card
    if not get_token():
        raise UserError(f"{repo}: uploading needs a token that may write there; set HF_TOKEN, or run `hf auth login`")
    with said(repo, repo, "model"):
        try:
            api = HfApi()
            api.create_repo(repo, private=private or None, exist_ok=True)
            message = f"{path.resolve().name}: model and card"
            done = api.upload_folder(
                repo_id=repo, folder_path=source.folder, allow_patterns=list(WANTED), commit_message=message
            )
        except errors.HfHubHTTPError as error:
            code = error.response.status_code
            if code in (401, 403):
                raise UserError(
                    f"{repo}: the Hub refuses the token (HTTP {code}); it must be valid, and may write to {repo}"
                ) from None
            raise
        except ValueError as error:  # what the Hub says of the card, or of a file
            raise UserError(f"{repo}: {' '.join(str(error).split())[:300]}") from None
    say(f"{done.commit_url}")
    return card
