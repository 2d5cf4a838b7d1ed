"""The conformance kit: of the distribution, and of each of its parsers."""

from __future__ import annotations

from tokenspeed_parsers import BASE, DEEPSEEK_R1, JSON, PASSTHROUGH, QWEN3, TAGGED
from tokenspeed_testing.distribution import DistributionConformance
from tokenspeed_testing.parser import ParserConformance


class TestDistribution(DistributionConformance):
    distribution = "tokenspeed-parsers"


class TestTagged(ParserConformance):
    spec, kind = TAGGED, "tool_parsers"


class TestJson(ParserConformance):
    spec, kind = JSON, "tool_parsers"


class TestPassthrough(ParserConformance):
    spec, kind = PASSTHROUGH, "tool_parsers"


class TestBase(ParserConformance):
    spec, kind = BASE, "reasoning_parsers"


class TestQwen3(ParserConformance):
    spec, kind = QWEN3, "reasoning_parsers"


class TestDeepseekR1(ParserConformance):
    spec, kind = DEEPSEEK_R1, "reasoning_parsers"
