"""A judge that a WebService plays: an OpenAI-compatible chat endpoint that compares prediction and references."""

import json
import re

from aiohttp import web
from helpers.eval_records import reply

RIGHT, WRONG = "The same. <judgment>Correct</judgment>", "<judgment>Incorrect</judgment>"


async def judges_by_prediction(request: web.Request) -> web.Response:
    """Correct where the prediction is one of the references."""
    prompt = json.loads(await request.read())["messages"][0]["content"]
    references, prediction = (
        re.search(rf"<{tag}>\n(.*?)\n</{tag}>", prompt, re.DOTALL)[1] for tag in ("references", "prediction")
    )
    return web.json_response(reply(RIGHT if f"- {prediction}" in references.split("\n") else WRONG))
