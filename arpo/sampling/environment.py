"""The environment of a policy: the format of its tool calls, the tools, and the prompts that offer them."""

from __future__ import annotations

from dataclasses import replace

from arpo.config.sections import DataConfig, ModelConfig, ProtocolConfig
from arpo.config.tools import ToolsConfig
from arpo.data import load_prompts, tokenize_prompts
from arpo.data.hub import local_file, source_of
from arpo.engine.team import Team
from arpo.model import load_tokenizer
from arpo.options import RolloutConfig
from arpo.protocol.prompts import with_system_prompt
from arpo.start.trial import try_context
from arpo.tools import check_offered, make_codec, make_tools, prices_of, system_prompt_for, tool_schemas
from arpo.trajectory import Prompt


class Environment:
    """Codec and tools of a run."""

    def __init__(
        self, model: ModelConfig, protocol: ProtocolConfig, tools: ToolsConfig, team: Team, rollout: RolloutConfig
    ):
        """Start the tools. Collective. Raises UserError if a tool cannot start, or if results have no room."""
        self.schemas = tool_schemas(tools)
        tokenizer = load_tokenizer(model.path)
        self.codec = make_codec(tokenizer, protocol, self.schemas, enable_thinking=model.enable_thinking)
        self.codec.check_result_room(rollout.max_result_tokens)
        try_context(rollout, self.codec)
        made = team.ranks.call_together(lambda: make_tools(tools))
        self.tools = team.tool_runner(made, prices_of(tools))

    def prompts(self, file: str, cfg: DataConfig) -> list[Prompt]:
        """Return the prompts of a file, or of a data set on the Hub, as tokens; [] for "". Raises UserError."""
        prompts = load_prompts(local_file(file), source=source_of(file)) if file else []
        check_offered(prompts, self.codec.tools, file)
        system_prompt = system_prompt_for(cfg.system_prompt, self.schemas, form=self.codec.format)
        prompts = [replace(prompt, messages=with_system_prompt(prompt.messages, system_prompt)) for prompt in prompts]
        return tokenize_prompts(
            prompts, self.codec.render_prompt, max_prompt_tokens=cfg.max_prompt_tokens, overlong=cfg.overlong, path=file
        )
