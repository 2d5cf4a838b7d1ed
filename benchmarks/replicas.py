"""Compare ways to choose a replica for a request, on a simulated workload of agents.

    python benchmarks/replicas.py

It needs no GPU. "prefix and load" is the server's own router; each replica is a simulated engine with a prefix cache of
bounded size. Times are in units of the computation of one prompt token.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from tokenspeed_server.replicas import router
from tokenspeed_server.replicas.memory import GRANULARITY, ReplicaMemory, prefix_digests
from tokenspeed_server.replicas.router import ReplicaLoad, choose

# The cost of an output token of a sequence in a large batch, in prompt tokens.
OUTPUT_COST = 4
NUM_OUTPUT = 200  # tokens of a turn
NUM_SYSTEM = 2000  # tokens of a system prompt and its tools
NUM_TURN = 400  # new tokens that a turn adds: the answer, and the result of a tool
NUM_TURNS = 12


@dataclass
class Replica:
    """An engine that computes prompts one after another, and forgets the least recently used prefixes."""

    num_cache: int  # digests
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    free_at: float = 0.0  # end of the prefills that it has
    num_running: int = 0
    num_queries: int = 0
    num_hits: int = 0

    def prefill(self, digests: list[int], num_tokens: int, now: float) -> tuple[float, int]:
        """Return when the prompt is computed, and how many tokens of it were."""
        num_found = 0
        while num_found < len(digests) and digests[num_found] in self.cache:
            num_found += 1
        for digest in reversed(digests):  # the beginning is evicted last
            self.cache.pop(digest, None)
            self.cache[digest] = None
        while len(self.cache) > self.num_cache:
            self.cache.popitem(last=False)
        num_computed = num_tokens - num_found * GRANULARITY
        self.num_queries += num_tokens
        self.num_hits += num_tokens - num_computed
        # Running sequences slow the prefill down, since they share its steps.
        self.free_at = max(now, self.free_at) + num_computed + OUTPUT_COST * self.num_running
        return self.free_at, num_computed


Choose = Callable[[list[ReplicaLoad], list[int], int, int], int]


def prefix_aware(loads: list[ReplicaLoad], cached: list[int], num: int, turn: int) -> int:
    """Choose as the server does."""
    chosen = choose(loads, cached, num)
    assert chosen is not None
    return chosen


def round_robin(loads: list[ReplicaLoad], cached: list[int], num: int, turn: int) -> int:
    """Choose the next one."""
    return turn % len(loads)


def least_loaded(loads: list[ReplicaLoad], cached: list[int], num: int, turn: int) -> int:
    """Choose by load alone."""
    chosen = choose(loads, [0] * len(loads), num)
    assert chosen is not None
    return chosen


def simulate(
    choice: Choose, num_replicas: int, num_agents: int, num_kv_tokens: int, seed: int
) -> tuple[float, float, float, float]:
    """Return the hit rate, the mean and 99th percentile of the wait for the first token, and the total time."""
    rng = random.Random(seed)
    replicas = [Replica(num_kv_tokens // GRANULARITY) for _ in range(num_replicas)]
    memory = ReplicaMemory(1, num_replicas)
    memory.fit(num_kv_tokens)
    num_prefill, num_computed = [0] * num_replicas, [0] * num_replicas
    systems = [[rng.randrange(10**6) for _ in range(NUM_SYSTEM)] for _ in range(4)]
    # (time, number, event): "ask" of a turn, "token" of its first token, "end"
    events: list[tuple[float, int, str, tuple[int, ...]]] = []
    prompts = {agent: list(systems[agent % 4]) for agent in range(num_agents)}
    turns = dict.fromkeys(range(num_agents), 0)
    number, num_asked, waits, now = 0, 0, [], 0.0
    for agent in range(num_agents):
        heapq.heappush(events, (rng.random() * NUM_SYSTEM, number := number + 1, "ask", (agent,)))
    while events:
        now, _, event, (agent, *more) = heapq.heappop(events)
        if event == "ask":
            prompts[agent] += [rng.randrange(10**6) for _ in range(rng.randrange(2 * NUM_TURN))]
            prompt = np.array(prompts[agent], np.int32)
            digests = prefix_digests(prompt, "", "")
            loads = [
                ReplicaLoad(replica.num_running, num_prefill[i], num_computed[i])
                for i, replica in enumerate(replicas)
            ]
            cached = memory.find(digests)
            chosen = choice(loads, cached, len(prompt), num_asked)
            num_asked += 1
            memory.add(chosen, digests)
            left = len(prompt) - cached[chosen]
            num_prefill[chosen] += left
            num_computed[chosen] += left
            at, _ = replicas[chosen].prefill(digests.tolist(), len(prompt), now)
            replicas[chosen].num_running += 1
            waits.append(at - now)
            heapq.heappush(events, (at, number := number + 1, "token", (agent, chosen, left)))
        elif event == "token":
            chosen, left = more
            num_prefill[chosen] -= left
            seconds = NUM_OUTPUT * (20 + OUTPUT_COST * replicas[chosen].num_running) / 4
            heapq.heappush(events, (now + seconds, number := number + 1, "end", (agent, chosen)))
        else:
            replicas[more[0]].num_running -= 1
            turns[agent] += 1
            if turns[agent] == NUM_TURNS:  # another agent takes its place
                turns[agent] = 0
                prompts[agent] = list(systems[rng.randrange(4)])
            if num_asked < NUM_TURNS * num_agents * 4:
                pause = rng.expovariate(1 / 4000)  # a tool runs
                heapq.heappush(events, (now + pause, number := number + 1, "ask", (agent,)))
    hits = sum(each.num_hits for each in replicas) / sum(each.num_queries for each in replicas)
    return hits, statistics.mean(waits), sorted(waits)[len(waits) * 99 // 100], now


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=4, help="number of replicas")
    parser.add_argument(
        "--kv-tokens", type=int, default=200_000, help="tokens in each prefix cache"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the workload")
    given = parser.parse_args()
    choices = {
        "round robin": round_robin,
        "load only": least_loaded,
        "prefix and load": prefix_aware,
    }
    print("| agents | choice | cache hits | mean wait | 99th percentile | total |")
    print("|---:|---|---:|---:|---:|---:|")
    for num_agents in (16, 64, 128):
        for name, choice in choices.items():
            row = simulate(choice, given.replicas, num_agents, given.kv_tokens, given.seed)
            show(num_agents, name, row)
    default = router.SEQUENCE_COST
    for cost in (64, 256, 1024):
        router.SEQUENCE_COST = cost
        row = simulate(prefix_aware, given.replicas, 64, given.kv_tokens, given.seed)
        show(64, f"prefix and load, SEQUENCE_COST {cost}", row)
    router.SEQUENCE_COST = default


def show(num_agents: int, name: str, row: tuple[float, float, float, float]) -> None:
    """Print a row of the table."""
    hits, mean, high, total = row
    print(
        f"| {num_agents} | {name} | {100 * hits:.1f} % | {mean:.0f} | {high:.0f} | {total:.0f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
