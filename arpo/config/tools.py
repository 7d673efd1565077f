"""Options of the tools, in sections like the sections of arpo/options.py. The docstring of a field is the `--help`
text."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from arpo.config.bounded import parse_fields
from arpo.config.facts import MAY_CHANGE, AtLeast, Between, Needs
from arpo.config.named import check_name, is_own
from arpo.errors import UserError

PYTHON = Needs("tools.names", has=("python",))
SEARCH = Needs("tools.names", has=("search",))
BACKEND = "tools.search.backend"
SEARCHES = Needs(BACKEND, not_in=("replay",), use=("local", "http", "brightdata", "serper"))
ONLINE = Needs(BACKEND, not_in=("local", "replay"), use=("http", "brightdata", "serper"))
ENGINES = Needs(BACKEND, "brightdata", "serper")
READS_PAGES = Needs("tools.search.read_pages", use=1)


@dataclass(frozen=True)
class PythonConfig:
    """The <python> tool. Every rank has one jailed host process, and every call is a fork of the host process."""

    FACTS = (PYTHON, MAY_CHANGE)

    wall_s: Annotated[float, Between(2, 86400)] = 20.0
    """Wall-clock limit of one call in seconds. The processes of a call together may compute for half of this time."""
    memory_mib: Annotated[int, AtLeast(128)] = 1024
    """Memory limit of one call in MiB."""
    max_concurrent: Annotated[int, AtLeast(1)] = 8
    """Largest number of calls of a rank that run at the same time. Other calls wait; the wait does not count against
    wall_s."""
    interpreter: str = ""
    """Python (3.9 or newer) of a virtual or conda environment. The code may import the packages of this environment.
    Empty = the Python of the run."""
    cgroup: str = "auto"
    """Folder of a cgroup (version 2). Each call gets a cgroup below this folder, with the limits for all processes of
    the call together. auto = use a cgroup if one is delegated to this run; none = never. An unusable folder ends the
    run."""
    allow_unsafe: bool = False
    """Run code even where no isolation is available. Model-written code then runs as you, with your files."""

    @property
    def cpu_s(self) -> float:
        """Longest compute time of one call in seconds, summed over the processes of the call."""
        return self.wall_s / 2


@dataclass(frozen=True)
class SearchConfig:
    """The <search> tool."""

    FACTS = (SEARCH,)

    backend: Literal["local", "http", "brightdata", "serper", "replay"] = "replay"
    """local = BM25 over `corpus`; http = a retriever at `url`; brightdata = Bing, key in BRIGHTDATA_API_KEY; serper =
    Google, key in SERPER_API_KEY; replay = only the contents of `cache` (a miss gives the model an error to read)."""
    corpus: Annotated[str, Needs(BACKEND, "local")] = ""
    """local: jsonl file with one object per line: {"title", "text"}, {"contents"}, or {"key", "text"} (then only the
    key is indexed). The index is built once, beside the corpus (in the user's cache folder if the corpus folder is
    read-only)."""
    url: Annotated[str, MAY_CHANGE, ONLINE] = ""
    """http: address of a retriever, like http://host:8000/retrieve (docs/tools.md has the form of the requests).
    brightdata, serper: a gateway to use instead of the service's own address."""
    zone: Annotated[str, MAY_CHANGE, Needs(BACKEND, "brightdata")] = ""
    """brightdata: name of your SERP API zone."""
    market: Annotated[str, ENGINES] = "auto"
    """brightdata, serper: language and country, like en-US; auto = zh-CN for queries with Chinese characters, else
    en-US."""
    location: Annotated[str, ENGINES] = ""
    """brightdata, serper: country of the search, like cn (the released code's). Empty = the country of the market."""
    top_k: Annotated[int, AtLeast(0), SEARCHES] = 0
    """Largest number of passages or results per query. 0 = 3 with local and http, 10 with brightdata and serper."""
    requests_per_second: Annotated[float, AtLeast(0), MAY_CHANGE, ONLINE] = 50.0
    """http, brightdata, serper: limit over all ranks. 0 = none. Each rank has an equal share, unless `cache` names a
    class that keeps a common limit."""
    deadline_s: Annotated[float, Between(0.001, 86400), MAY_CHANGE, SEARCHES] = 30.0
    """Longest time of one search in seconds, including the wait for its turn and all tries. A slower search fails, and
    its trajectory ends: training drops it, and an evaluation asks again when the same command is started again."""
    read_pages: Annotated[int, AtLeast(0), ONLINE] = 0
    """http, brightdata, serper: number of first results to replace by the text of their pages (instead of snippets). 0
    = none. Needs the browse extra. If a page cannot be read, the snippet stays."""
    page_chars: Annotated[int, AtLeast(1), READS_PAGES] = 3000
    """Number of characters to keep of a page, around its snippet. rollout.max_result_tokens also cuts the result."""
    browse_private_addresses: Annotated[bool, MAY_CHANGE, READS_PAGES] = False
    """Also read pages of your own network: private, loopback and link-local addresses. The policy's queries decide
    which pages are read, so set this only if no server in your network trusts its callers."""
    summarizer_url: Annotated[str, MAY_CHANGE, READS_PAGES] = ""
    """OpenAI-compatible server, like http://host:8000, or its chat endpoint. The server sums up a page with respect to
    the query. If the server needs a key, the key is read from SUMMARIZER_API_KEY. Empty = no summary."""
    summarizer_model: Annotated[str, Needs("tools.search.summarizer_url", use="URL")] = ""
    """Name of the model at summarizer_url."""
    summarizer_extra_body: Annotated[str, Needs("tools.search.summarizer_url", use="URL")] = ""
    """JSON object with more fields of every request to summarizer_url (see judge.extra_body). With vLLM,
    {"chat_template_kwargs": {"enable_thinking": false}} switches the thoughts of Qwen3 off."""
    cache: Annotated[str, MAY_CHANGE] = ""
    """Cache of query -> result: a SQLite file on a local disk (created if missing), or FILE.py:NAME=PLACE, where NAME
    is a class. Use a class for several nodes, or for results in the released format (docs/tools.md)."""
    mode: Annotated[Literal["live", "record", "replay", "replay_strict"], MAY_CHANGE, SEARCH] = "record"
    """live = ignore the cache (needs a backend to ask); record = read the cache, and add new results; replay = only
    read the cache, and give the model an error to read on a miss; replay_strict = like replay, but a miss stops the
    run."""

    @property
    def num_passages(self) -> int:
        """Largest number of passages or results per query: top_k, or the backend's default number if top_k is 0."""
        return self.top_k or (10 if self.backend in ("brightdata", "serper") else 3)

    @property
    def replays(self) -> bool:
        """True if all answers come from the cache."""
        return self.backend == "replay" or self.mode in ("replay", "replay_strict")

    def __post_init__(self) -> None:
        parse_fields("tools.search.summarizer_extra_body", self.summarizer_extra_body)  # which raises


@dataclass(frozen=True)
class ToolsConfig:
    """The tools of the policy. If a field has the name of a tool, the field is the section of that tool."""

    names: tuple[str, ...] = ("python", "search")
    """Tools for the policy to call. FILE.py:NAME = your own class or function (docs/tools.md)."""
    options: tuple[str, ...] = ()
    """Settings of tools from a file. Each entry is a mapping, on the command line as JSON: {"my_tool.py:MyTool":
    {"max_rows": 20}}. The tool has the same name as in tools.names."""
    price_per_call: Annotated[tuple[str, ...], MAY_CHANGE] = ()
    """Prices of paid tools, as NAME=PRICE, like search=0.0015, in any currency. The ledger charges only calls that the
    tool answered, not calls that the cache answered."""
    python: PythonConfig = field(default_factory=PythonConfig)
    search: SearchConfig = field(default_factory=SearchConfig)

    def __post_init__(self) -> None:
        for name in self.names:
            check_name("tools.names", name, "tools/__init__", "TOOLS")
        _ = self.options_by_tool  # which raises

    @property
    def options_by_tool(self) -> dict[str, dict[str, Any]]:
        """`options` by the name of the tool in `names`. Raises UserError for an entry that makes no sense."""
        found: dict[str, dict[str, Any]] = {}
        for entry in self.options:
            try:
                tree = json.loads(entry)
            except ValueError:
                tree = None
            if not isinstance(tree, dict) or not all(isinstance(options, dict) for options in tree.values()):
                form = '{"my_tool.py:MyTool": {"max_rows": 20}}'
                raise UserError(f"tools.options: an entry must be a mapping like {form}, not {entry[:60]!r}")
            for name in tree:
                if not is_own(name) or name not in self.names or name in found:
                    own = ", ".join(filter(is_own, self.names)) or "none"
                    raise UserError(f"tools.options: {name!r} must be, once, a FILE.py:NAME of tools.names ({own})")
            found |= tree
        return found
