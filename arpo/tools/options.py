"""Every knob of the tools. Sections like those of arpo/options.py, and as there a field's docstring is its `--help`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from arpo.errors import UserError


@dataclass(frozen=True)
class PythonConfig:
    """The <python> tool: one jailed host process per rank, a fork of it per call."""

    wall_s: float = 20.0
    """Wall-clock limit of one call in seconds; its processes together may compute for half of it."""
    memory_mib: int = 1024
    """Memory limit of one call."""
    max_concurrent: int = 8
    """Calls that run at the same time, per rank; the others wait (waiting does not count against wall_s)."""
    max_concurrent_per_node: int = 0
    """The same for all ranks and runs of this user on a machine together; 0 = no such limit."""
    interpreter: str = ""
    """Python (3.9 or newer) of a virtual or conda environment whose packages the code may import; empty = this one."""
    cache: str = ""
    """Cache of code -> result, a file or redis://host:port/db; empty = every call is run. Not for code that is meant
    to give another result each time."""
    mode: Literal["live", "record", "replay", "replay_strict"] = "record"
    """As tools.search.mode; in a replay nothing is run, so no sandbox is needed."""
    allow_unsafe: bool = False
    """Run even where no isolation is available. Model-written code then runs as you, with your files."""

    def replayed(self) -> PythonConfig:
        """The same tool, answering from its recorded cache only."""
        return replace(self, mode="replay_strict")

    def what_decides(self) -> dict[str, object]:
        """No setting of this tool makes other trajectories: its limits are the machine's business."""
        return {}

    @property
    def cpu_s(self) -> float:
        """Longest time that the processes of one call may compute, in seconds, summed over them."""
        return self.wall_s / 2


@dataclass(frozen=True)
class SearchConfig:
    """The <search> tool."""

    backend: Literal["local", "http", "brightdata", "serper", "replay"] = "replay"
    """local = BM25 over `corpus`; http = a retriever at `url`; brightdata = Bing, key in BRIGHTDATA_API_KEY; serper =
    Google, key in SERPER_API_KEY; replay = only what `cache` holds (a miss is an error that the model reads)."""
    corpus: str = ""
    """local: jsonl, one {"title", "text"} or {"contents"} object per line, or {"key", "text"}: then only the key is
    indexed. The index is built once, beside the corpus (or in the user's cache folder where that is read-only)."""
    url: str = ""
    """http: POST {"queries", "topk"} goes here, e.g. http://host:8000/retrieve; brightdata, serper: a gateway to use
    instead of the service's own address."""
    zone: str = ""
    """brightdata: name of your SERP API zone."""
    market: str = "auto"
    """brightdata, serper: language and country, like en-US; auto = zh-CN for queries with Chinese characters, else
    en-US."""
    top_k: int = 0
    """Passages or results per query, at most; 0 = 3 of local and http, 10 of brightdata and serper."""
    requests_per_second: float = 50.0
    """http, brightdata, serper: limit over all ranks: kept in the Redis server if `cache` is one, else each rank has an
    equal share; 0 = none."""
    deadline_s: float = 30.0
    """Longest time of one search in seconds: waiting for its turn and all tries. Past it the trajectory is dropped."""
    read_pages: int = 0
    """http, brightdata, serper: pages of the first results that are fetched and read in place of their snippets; 0 =
    none. Needs the browse extra. A page that cannot be read leaves its snippet."""
    page_chars: int = 3000
    """Characters kept of a page: those around its snippet. rollout.max_result_tokens cuts the result as well."""
    browse_private_addresses: bool = False
    """Read pages of the own network too: private, loopback and link-local addresses. The policy's queries decide which
    pages are found, so only where nothing in that network trusts its callers."""
    summarizer_url: str = ""
    """OpenAI-compatible chat endpoint that sums up what a page says on the query, like
    http://host:8000/v1/chat/completions; key, if it needs one, in SUMMARIZER_API_KEY; empty = the passage itself."""
    summarizer_model: str = ""
    """Name of the model there."""
    cache: str = ""
    """Cache of query -> result: a SQLite file on a local disk (created if missing); a .json file in the released format
    (imported into a SQLite file beside it); or redis://host:port/db for several nodes (password in the environment,
    ARPO_REDIS_PASSWORD)."""
    mode: Literal["live", "record", "replay", "replay_strict"] = "record"
    """live = ignore the cache (needs a backend to ask); record = read it, and add what is new; replay = read only, a
    miss is an error that the model reads; replay_strict = a miss stops the run."""

    @property
    def num_passages(self) -> int:
        """top_k with 0 decided."""
        return self.top_k or (10 if self.backend in ("brightdata", "serper") else 3)

    @property
    def replays(self) -> bool:
        """Nothing but the cache is asked."""
        return self.backend == "replay" or self.mode in ("replay", "replay_strict")

    def replayed(self) -> SearchConfig:
        """The same tool, answering from its recorded cache only."""
        return replace(self, mode="replay_strict")

    def what_decides(self) -> dict[str, object]:
        """The settings that make other trajectories."""
        return {name: getattr(self, name) for name in ("backend", "corpus", "top_k", "read_pages")}


@dataclass(frozen=True)
class ToolsConfig:
    """Which tools the policy has. A field that has the name of a tool is that tool's own section.

    Such a section may say how it is `replayed` from recorded results, and `what_decides` the trajectories of an
    evaluation; without the former a tool runs as ever, without the latter all its settings decide.
    """

    names: tuple[str, ...] = ("python", "search")
    """Tools by tag."""
    price_per_call: tuple[str, ...] = ()
    """NAME=PRICE of tools that cost money, like search=0.0015, in any currency: what the ledger charges for each call
    that the tool answered itself, not its cache."""
    python: PythonConfig = field(default_factory=PythonConfig)
    search: SearchConfig = field(default_factory=SearchConfig)

    @property
    def sections(self) -> dict[str, Any]:
        """The sections of the named tools, by tag; a tool without settings has none."""
        return {name: getattr(self, name) for name in self.names if name in vars(self)}

    def replayed(self) -> ToolsConfig:
        """The same tools, each that can have a cache answering from it only. Raises UserError for one without."""
        recorded = {name: section for name, section in self.sections.items() if hasattr(section, "replayed")}
        for name, section in recorded.items():
            if not section.cache:
                raise UserError(
                    f"eval.replay needs what was recorded: set tools.{name}.cache, or leave it out of tools.names"
                )
        return replace(self, **{name: section.replayed() for name, section in recorded.items()})

    def what_decides(self) -> dict[str, Any]:
        """The settings under which the trajectories of an evaluation may stand in one table."""
        decides = {
            name: section.what_decides() if hasattr(section, "what_decides") else asdict(section)
            for name, section in self.sections.items()
        }
        return {"names": self.names} | decides
