"""The arms that a hybrid profile is compared with; the oracle on scripted models."""

from collections.abc import Sequence

import pytest

from jobs.arms import Work, profile_arm
from jobs.bench import parser
from jobs.comparison import Measured
from jobs.hybrid_arms import ORACLE, Hindsight, OracleChooser, hindsight, hybrid_parts, request_name, request_number
from jobs.paired import plan_from
from serving.build import Built
from serving.config import Eagle3Drafter, HybridDrafter, Profile, RuleChooser, SuffixDrafter
from serving.decode.grouping import Grouping
from serving.decode.guard import FixedDrafts
from serving.decode.limits import SchedulerLimits
from serving.decode.scheduler import Scheduler
from serving.drafters import chooser as choosers
from serving.drafters.hybrid import HybridDrafter as HybridRole
from serving.drafters.suffix import SuffixDrafter as SuffixRole
from serving.errors import ConfigError
from serving.memory.suffix import SuffixCache
from serving.models.tokenizer import ChatTokenizer
from serving.protocols import Drafter, DraftRequest
from serving.types import as_ids
from serving.verifiers.full import FullVerifier
from tests.decode.scripted import ScriptedModel, oracle, plain, spell
from tuning.prompts import Prompt
from tuning.traces import TracingBook

NO_STOP = frozenset({198})
PROMPTS = [(5, 9), (5, 10), (7, 3)]
NUM_TOKENS = 90
MINE = Profile(name="mine", drafter=HybridDrafter(model=Eagle3Drafter(max_draft=3)))


def looping(ids: Sequence[int]) -> int:
    """A text that repeats itself with changes, so that neither source is always the better one."""
    return 3 + (len(ids) % 7 if len(ids) % 23 else int(ids[-1]) % 50)


WORK = Work([as_ids(ids) for ids in PROMPTS], NO_STOP, NUM_TOKENS, batch=2)


def built(drafter: Drafter, book: TracingBook | None = None) -> Built:
    limits = SchedulerLimits(2, 256, 64, 8)
    scheduler = Scheduler(
        verifier=FullVerifier(ScriptedModel(looping)), drafter=drafter, decode=spell, limits=limits,
        grouping=Grouping(shares_cores=True), policy=FixedDrafts(8), rules=book,
    )  # fmt: skip
    return Built(Profile(name="scripted"), scheduler, limits, ChatTokenizer("scripted", NO_STOP, 199, None))


def model() -> Drafter:
    return oracle(looping, right=2)


def known() -> list[Hindsight]:
    book = TracingBook(every_position=True)
    prompts = [Prompt(id=str(number), turns=("x",)) for number in range(len(PROMPTS))]
    return hindsight(built(model(), book), book, prompts, WORK.requests())


def measured(chooser: choosers.Chooser) -> Measured:
    cache = SuffixRole(SuffixCache(max_draft=8))
    return profile_arm(built(HybridRole(cache, model(), chooser, model_max_draft=4)), WORK).measure()


def test_the_first_pass_finds_the_text_and_what_the_model_yields_everywhere() -> None:
    for ids, found in zip(PROMPTS, known(), strict=True):
        assert found.output_ids.tolist() == plain(looping, ids, NUM_TOKENS)
        assert found.model_yields.tolist()[1:-3] == [2] * (NUM_TOKENS - 4)


def test_the_oracle_says_the_same_in_fewer_cycles_than_either_source_where_it_drafts_alone() -> None:
    best = measured(OracleChooser(known()))
    assert best.outputs == [plain(looping, ids, NUM_TOKENS) for ids in PROMPTS]
    assert best.cycles_per_1k is not None
    for threshold in (0.0, 99.0):  # the cache wherever it finds something; the model always
        other = measured(choosers.RuleChooser(threshold))
        assert other.cycles_per_1k is not None
        assert best.cycles_per_1k < other.cycles_per_1k


def test_what_a_build_measures_is_the_model() -> None:
    cache = SuffixRole(SuffixCache(max_draft=8))
    drafter = HybridRole(cache, model(), OracleChooser(known()), model_max_draft=4)
    repeated = as_ids([1, 2, 3, 4] * 6)
    (draft,) = drafter.start([DraftRequest("measure", repeated, len(repeated), 4)]).result()
    assert draft.source == "model"


def test_a_cycle_is_a_round_a_thousand_tokens() -> None:
    found = profile_arm(built(oracle(looping, right=4)), WORK).measure()
    assert found.target_passes_per_token is not None
    assert found.cycles_per_1k == pytest.approx(1000 * found.target_passes_per_token, abs=1.0)


def test_a_request_is_known_by_its_number_in_every_call() -> None:
    assert request_number(request_name(17, call=4)) == 17
    assert request_number("measure") is None
    assert [one.request_id for one in WORK.requests(call=2)] == ["2-0", "2-1", "2-2"]
    assert {one.salt for call in (1, 2) for one in WORK.requests(call=call)} == {"repeat-1", "repeat-2"}


def test_the_parts_of_a_hybrid_share_its_settings() -> None:
    parts = {one.name: one for one in hybrid_parts(MINE)}
    assert list(parts) == ["plain", "eagle3", "suffix", "rule", "hvd"]
    assert {one.target for one in parts.values()} == {MINE.target}
    assert parts["eagle3"].drafter == Eagle3Drafter(max_draft=3)
    assert parts["suffix"].drafter == SuffixDrafter()
    assert parts["hvd"].drafter == MINE.drafter
    rule = parts["rule"].drafter
    assert isinstance(rule, HybridDrafter)
    assert rule.chooser == RuleChooser()
    assert rule.model == Eagle3Drafter(max_draft=3)


@pytest.mark.parametrize("drafter", [SuffixDrafter(), HybridDrafter(chooser=RuleChooser())])
def test_what_is_no_hvd_is_refused(drafter: SuffixDrafter | HybridDrafter) -> None:
    with pytest.raises(ConfigError, match="--hybrid: 'other' must draft by kind hybrid with a chooser of kind yield"):
        hybrid_parts(Profile(name="other", drafter=drafter))


def test_the_flag_makes_the_arms() -> None:
    def names(*flags: str) -> list[str]:
        args = parser().parse_args(["--prompts", "p", "--json", "j", "--hybrid", "hybrid", *flags])
        args.batch = 1
        plan = plan_from(args, 3)
        assert plan.hybrid is not None
        return [profile.name for profile in plan.profiles]

    assert names() == ["plain", "eagle3", "suffix", "rule", "hvd"]
    assert names("--profiles", "strict") == ["strict", "plain", "eagle3", "suffix", "rule", "hvd"]
    with pytest.raises(ConfigError, match="'plain' appears 2 times"):
        names("--profiles", "plain")
    assert ORACLE not in names()
