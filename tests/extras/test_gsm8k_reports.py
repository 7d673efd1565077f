"""GSM8K under configs/gsm8k.yaml: its rows are read as they are, and answers of public reports are graded.

Each case names the project and the number of the report.
"""

import pytest
from helpers.edits import ROOT

from arpo.data import load_prompts
from arpo.rewards import score
from arpo.rewards.math_answer import math_accuracy
from extras.llm_demo.gsm8k import final_answer, read_questions

GSM8K = ROOT.parent / "shared/data/gsm8k"
"""GSM8K as its authors released it. Not in this repository."""

RIGHT = {
    "a sentence around the box": r"So she earns 18 dollars. The answer is \boxed{18}.",
    "verl #2150: a box, which its default prompt does not ask for": r"<think>9 * 2</think>" + "\n\n" + r"\boxed{18}",
    "evalscope PR #903: the answer within much text": "**Step 1**\n" * 30 + r"**Answer:** \(\boxed{18}\)" + "\nDone.",
    "a unit": r"\boxed{18 \text{ dollars}}",
    "a sign of money": r"\boxed{\$18}",
    "decimals": r"\boxed{18.00}",
    "open-r1 #235: tags of another format": r"<think>9 * 2</think><answer>\boxed{18}</answer>",
    "a box for a part, and then one for the answer": r"\boxed{9} eggs are left, so \boxed{18}",
}
WRONG = {
    "theLMbook PR #12: right, but not marked as the answer": "So she earns 18 dollars.",
    "HRPO #1: the marks of GSM8K's own rows": "9 * 2 = 18\n#### 18",
    "a thought that does not end": r"<think>9 * 2 = \boxed{18}",
    "X-R1 #53: only in the thought": r"<think>\boxed{18}</think>It is clear.",
    "a box that does not end": r"The answer is \boxed{18",
    "an empty box": r"\boxed{}",
    "tunix #943: another number behind the answer": r"\boxed{18}, and so \boxed{16} eggs a day",
}


@pytest.mark.parametrize("case", [*RIGHT, *WRONG])
def test_a_right_answer_counts_in_every_form_that_was_reported_if_it_is_in_the_last_box(case):
    """docs/training.md says so: the score of step 0 is partly one of format."""
    parts = score((RIGHT | WRONG)[case], ["18"], "gsm8k", form="hermes", tools=()).parts
    assert parts["accuracy"] == (case in RIGHT)


@pytest.mark.skipif(not GSM8K.exists(), reason="GSM8K is not here")
@pytest.mark.parametrize(("part", "num_rows"), [("train", 7473), ("test", 1319)])
def test_gsm8ks_own_rows_are_questions_with_the_number_behind_the_marks(part, num_rows):
    """huggingface/trl #3892 asks for a standard way to train on GSM8K; here it needs no conversion."""
    prompts, rows = load_prompts(GSM8K / f"{part}.jsonl"), read_questions(str(GSM8K), part)
    assert len(prompts) == num_rows
    assert {prompt.data_source for prompt in prompts} == {"gsm8k"}
    for prompt, row in zip(prompts, rows, strict=True):
        [answer] = prompt.answers
        assert prompt.messages[-1]["content"].strip() == row["question"]
        assert answer.replace(",", "") == final_answer(row)
        assert "<<" not in answer and "####" not in answer
    for prompt in prompts[::50]:
        assert math_accuracy(prompt.answers[0], prompt.answers) == 1
