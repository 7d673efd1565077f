"""The faults that scripts/mutants.py plants: a sign, a boundary, a missing mask, a wrong denominator, a lost factor.

A new fault is one line, with a text that stands exactly once in its file.
"""

FAULTS: dict[tuple[str, str], list[tuple[str, str]]] = {
    ("losses", "test_losses test_kl"): [
        ("torch.where(self.mask.bool(), self.logprobs - self.old_logprobs, 0.0)", "self.logprobs - self.old_logprobs"),
        ("(1 + cfg.entropy_advantage_weight * z).clamp(min=0)", "(1 + cfg.entropy_advantage_weight * z)"),
        ("loss = loss - cfg.entropy_coefficient", "loss = loss + cfg.entropy_coefficient"),
        ("losses = torch.maximum(-inputs", "losses = torch.minimum(-inputs"),
        ("over = (inputs.advantages < 0) & ", "over = "),
        ("ratio.clamp(low, high).detach()", "ratio.clamp(low, high)"),
        ("above & inputs.mask, high * ratio / ratio.detach()", "above & inputs.mask, high * ratio.detach() / ratio"),
        ("mean * mean) / (count - 1)", "mean * mean) / count"),
        ("(losses.sum(-1) / mask.sum(-1).clamp(min=1)", "(losses.sum(-1) / mask.shape[-1]"),
        ("self.loss_cfg.entropy_target - entropy)", "entropy - self.loss_cfg.entropy_target)"),
        ("== all_ids) & mask[..., None]", "== all_ids)"),
    ],
    ("kl", "test_kl"): [
        ("0.5 * difference.square()", "difference.square()"),
        ("(-difference).clamp(-MAX_LOG_RATIO", "difference.clamp(-MAX_LOG_RATIO"),
    ],
    ("advantages", "test_advantages test_tree_credits"): [
        ("group.std(unbiased=True)", "group.std(unbiased=False)"),
        ("t.reward - t.kl_penalty for t in trajectories", "t.reward for t in trajectories"),
        ("if len(trained) == 1 < len(group.trajectories)", "if len(trained) == 1 == len(group.trajectories)"),
        ("late_reward = torch.where(sampled[:, t], 0.0, reward)", "late_reward = 0.0 * reward"),
        ("delta + gamma * lam * advantage", "delta + gamma * advantage"),
        ("counts[writer][start:end] += 1", "counts[writer][start:end] = 1"),
        ("values[turn] - values[before] for", "values[before] - values[turn] for"),
        ("(num_tokens.sum() - 1).clamp(min=1)", "num_tokens.sum().clamp(min=1)"),
        ("rewards.std(ddof=ddof)", "rewards.std(ddof=0)"),
    ],
    ("branching", "test_branching test_properties"): [
        ("max((base + weight * delta_entropy) * damping", "max((base + weight * delta_entropy * damping)"),
        ("return self.entropy - self.root_entropy", "return self.root_entropy - self.entropy"),
        ("claim[0] - earlier[0] + 1", "claim[0] - earlier[0]"),
        ("if claim < (turn, path))", "if claim[0] < turn)"),
        ("math.floor(group_size * share) + 1", "math.floor(group_size * share)"),
        ("return draw < probability", "return draw > probability"),
        ("self.expect(path, turn + 1)", "self.expect(path, turn)"),
    ],
    ("retrospective", "test_retrospective"): [
        ("surprise(t, turn) - SIBLING_PENALTY", "surprise(t, turn) + SIBLING_PENALTY"),
        ("(-fork.score, rng", "(fork.score, rng"),
        ("num_left / (cfg.expansion_rounds - group.num_rounds)", "num_left / cfg.expansion_rounds"),
        ("for t in ordered if t.stop_reason != StopReason.ERROR", "for t in ordered"),
    ],
    ("growing", "test_rollout protocol/test_contexts"): [
        ("evidence.consecutive + 1 if decision.wants else 0", "evidence.consecutive + decision.wants"),
        ("loss_mask[turn.end :] = [0] * len(token_ids)", "loss_mask[turn.end :] = [1] * len(token_ids)"),
        ("if len(tags) >= cfg.max_tool_calls", "if len(tags) > cfg.max_tool_calls"),
        ("len(self.trajectory.token_ids) + num_in_contexts", "len(self.trajectory.token_ids)"),
    ],
    ("rollout", "test_rollout test_rollout_hermes sampling/test_carry_over"): [
        ('seed += f"|{len(sampled)}"', "pass"),
        ("max(self.num_entropy_tokens - len(sampled), 0)", "self.num_entropy_tokens"),
        ("consecutive=evidence.consecutive + 1", "consecutive=evidence.consecutive"),
        ("live.has_failed |= result.infra_error", "live.has_failed = result.infra_error"),
        ("live.room(self.cfg) - self.cfg.answer_reserve_tokens", "live.room(self.cfg)"),
        ("elif len(trajectory.tool_calls) > self.cfg", "elif len(trajectory.tool_calls) >= self.cfg"),
    ],
    ("trajectory", "test_rollout protocol/test_contexts test_returned"): [
        ("if context.start <= fork_at", "if context.start < fork_at"),
        ("len(self.token_ids) - newest.start", "len(self.token_ids)"),
        ("range(turn.end, turn.result_end)", "range(turn.start, turn.result_end)"),
    ],
    ("batch", "test_batch test_tree"): [
        ("padded([indices - 1 for indices in positions]", "padded([indices for indices in positions]"),
        ("rank = loads.index(min(loads))", "rank = index % num_ranks"),
        ("load + lengths[index] <= max_tokens", "load + lengths[index] < max_tokens"),
        ("max(1, *(len(bins) for bins in bins_of_rank))", "max(1, len(bins_of_rank[rank]))"),
    ],
    ("tree", "test_tree test_properties"): [
        ("cost -= shared[start + 1]", "cost -= shared[start]"),
        ("if cost > limit and options", "if cost >= limit and options"),
        ("parents[path[1:]] = path[:-1]", "parents[path[1:]] = path[1:] - 1"),
    ],
    ("update", "test_update ranks/test_distributed"): [
        ("(loss * ranks.world_size).backward()", "loss.backward()"),
        ("rewards[last] = trajectory.reward", "rewards[-1] = trajectory.reward"),
        ("(micro.advantages - mean) / (std", "micro.advantages / (std"),
        ("rewards -= kl_penalties", "rewards += kl_penalties"),
        ("if is_first:", "if micro.old_entropies is not None:"),
        ("torch.expm1(difference) - difference", "torch.expm1(-difference) + difference"),
    ],
    ("rollout_correction", "test_rollout_correction"): [
        ("(weights > cfg.correction_high) | (weights < cfg.correction_low)", "weights > cfg.correction_high"),
        ("return weights * keep, token_means", "return weights, token_means"),
    ],
    ("selection", "test_advantages test_update sampling/test_sources"): [
        ("{t.reward - t.kl_penalty for", "{t.reward for"),
    ],
    ("sampling/branch_worth", "sampling/test_branch_worth"): [("0.0) * (1 - rho) / rho)", "0.0) * rho / (1 - rho))")],
    ("sampling/gradient_noise", "sampling/test_gradient_noise"): [
        ("/ (num_prompts - 1) / squares", "/ num_prompts / squares"),
    ],
    ("sampling/estimates", "sampling/test_gradient_noise"): [("degrees * without_one.var()", "without_one.var()")],
    ("sampling/carry_over", "sampling/test_carry_over"): [
        ("first_step + self.cfg.carry_over <= self.step", "first_step + self.cfg.carry_over < self.step"),
        ("set(finished[: self.num_prompts])", "set(finished[-self.num_prompts :])"),
    ],
    ("sampling/sources", "sampling/test_sources"): [
        ("num_mixed, 0) / expected_share", "num_mixed, 0) * expected_share"),
        ("if index < len(self.prompts) else None", "if index <= len(self.prompts) else None"),
    ],
    ("sft/token_store", "sft"): [
        ("if num_tokens > cfg.max_tokens", "if num_tokens >= cfg.max_tokens"),
        ("loss_mask=loss_mask[first:])", "loss_mask=0 * loss_mask[first:] + 1)"),
    ],
    ("protocol/codec", "protocol/test_hermes_codec"): [("else starts[-1:]", "else starts[:1]")],
    ("protocol/tags", "protocol/test_protocol protocol/test_token_chars sft rewards/test_rewards"): [
        ("untrained.append((end, len(text)))", "pass"),
        (' or head.find(f"</{tag}>", opened) >= 0', ""),
        ("return escape_tags(text, reserved_tags(tools))", "return escape_tags(text, tools)"),
        ("if len(tags) == 2 and has_result", "if len(tags) == 2"),
    ],
    ("protocol/hermes", "protocol/test_hermes protocol/test_hermes_codec sft"): [
        ("[of_results.index(value)] for value in of_calls", "[of_calls.index(value)] for value in of_results"),
    ],
    ("protocol/schema", "protocol/test_schema test_properties"): [
        ('type_name == "boolean" or isinstance(value, bool)', 'type_name == "boolean"'),
        ("choice == value and type(choice) is type(value)", "choice == value"),
    ],
    ("protocol/stop_watch", "test_properties"): [("default=1) - 1", "default=1) - 2")],
    ("protocol/contexts", "protocol/test_contexts"): [
        ("evidence.num_tokens > evidence.cfg.context_tokens", "evidence.num_tokens < evidence.cfg.context_tokens"),
    ],
    ("rewards/__init__", "rewards/test_rewards"): [
        ("-1.0 if reason else accuracy + bonus", "0.0 if reason else accuracy + bonus"),
        ("if call.ok and call.executed}", "}"),
    ],
    ("rewards/math_answer", "rewards/test_rewards rewards/test_grader_edges test_properties"): [
        ("len(digits) < 6", "len(digits) < 3"),
        ("return distance <= Fraction(1, 2 * 10", "return distance <= Fraction(1, 10"),
    ],
    ("rewards/qa", "rewards/test_rewards rewards/test_grader_edges"): [
        ("return 2 * num_common / (len(predicted) + len(expected))", "return num_common / len(expected)"),
    ],
    ("model/lora", "model/test_lora"): [
        (
            "return F.linear(x, merged(weight, a, b, scale), bias)",
            "return F.linear(x, weight, bias) + F.linear(F.linear(x, a), b) * scale",
        ),
        ("grad_b = rows.T @ F.linear(inputs, a) * ctx.scale", "grad_b = rows.T @ F.linear(inputs, a)"),
    ],
    ("data/order", "data/test_data"): [
        ("if start + count > per_epoch", "if start + count >= per_epoch"),
        ("enumerate(indices, start=1)", "enumerate(indices)"),
    ],
    ("data/prompts", "data/test_data"): [("len(bad) > max(MAX_BAD_ROWS", "len(bad) > min(MAX_BAD_ROWS")],
    ("tools/search/bm25", "tools/search/test_search"): [
        ("(-found[0][0], found[1])", "(-found[0][0], -found[1])"),
        ("hits[-1][0] < hits[top_k - 1][0]", "hits[-1][0] <= hits[top_k - 1][0]"),
        ("not in STOP_WORDS] or unique)", "not in STOP_WORDS])"),
    ],
    ("config/facts", "start/test_checks"): [
        ("not span.low <= values[knob]", "not span.low < values[knob]"),
        ("return value not in self.not_in", "return value in self.not_in"),
    ],
    ("config/bounded", "config/test_bounded"): [("if depth > MAX_DEPTH", "if depth > 20 * MAX_DEPTH")],
}  # fmt: skip
"""(file in arpo/, test files and folders) -> old text and new text of each fault."""
