"""Groups as all ranks have them after the exchange are to all who read them what they were."""

import json
import pickle
from array import array

import numpy as np
from helpers.updates import make_groups

from arpo.advantages import TREE_CREDITS, assign_advantages
from arpo.batch import row_of
from arpo.engine.team import compact
from arpo.log.dumps import dump_line
from arpo.metrics import distributions, rollout_metrics
from arpo.options import AdvantageConfig


def test_arrays_are_to_advantages_metrics_rows_and_dumps_what_the_lists_were():
    lists = make_groups()
    for t in (t for group in lists for t in group.trajectories):
        t.rollout_logprobs = array("f", t.rollout_logprobs).tolist()  # an engine's are float32
    arrays = pickle.loads(pickle.dumps([compact(group) for group in lists]))
    cfg = AdvantageConfig()
    for groups in (lists, arrays):
        assign_advantages(groups, cfg)
    assert rollout_metrics(arrays).values() == rollout_metrics(lists).values()
    assert distributions(arrays) == distributions(lists)
    for ours, theirs in zip(arrays, lists, strict=True):
        for credit in TREE_CREDITS.values():
            found, expected = credit(ours, cfg), credit(theirs, cfg)
            assert found.keys() == expected.keys() and all(np.array_equal(found[i], expected[i]) for i in found)
        for t, other in zip(ours.trajectories, theirs.trajectories, strict=True):
            assert isinstance(t.token_ids, array) and isinstance(other.token_ids, list)
            row, expected = vars(row_of(ours, t)), vars(row_of(theirs, other))
            assert all(np.array_equal(row[name], expected[name]) for name in expected)
            ours.prompt.messages[:] = theirs.prompt.messages[:] = [{"role": "user", "content": "?"}]
            assert json.loads(dump_line(ours, t, {})) == json.loads(dump_line(theirs, other, {}))
