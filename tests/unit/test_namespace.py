"""The identity of cached KV: tags, the salts that carry them, and the ledger of what was installed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl_sglang import namespace
from psrl_sglang.namespace import Tag, VersionLedger, compose_salt, split_salt

AWKWARD = "~#|:%/@\\\0 psrl12aé\u4e2d\U0001f600"
TEXT = st.one_of(
    st.text(st.sampled_from(AWKWARD), max_size=8),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.text(st.sampled_from("a~/é"), min_size=40, max_size=400),
    st.sampled_from(["12", "step-12", "1~", "1#e1-x", "ns:1", "psrl:1", "psrl:1|x", "%7E", "~", "sha256-00"]),
)
VERSION = TEXT.filter(bool)
EPOCH = st.sampled_from(["", "e1-a", "e2-a", "e1-b", "r1-a", "t1-a"])
TAG = st.builds(Tag, version=VERSION, epoch=EPOCH, namespace=TEXT, lagging=st.booleans())


def ledger(version="1", *, lag=0, instance="a", namespace=""):
    return VersionLedger(version, instance=instance, namespace=namespace, max_version_lag=lag)


def labels(book):
    return [book.tag_for(text).label for text in book.window()]


@given(TAG, TEXT)
def test_salt_gives_back_its_tag_and_the_users_salt(tag, user_salt):
    assert split_salt(compose_salt(str(tag), user_salt)) == (str(tag), user_salt or None)


@given(st.none() | TEXT.filter(lambda text: not text.startswith("psrl:")))
def test_salt_without_a_tag_is_the_users_own(user_salt):
    assert split_salt(user_salt) == (None, user_salt or None)


@given(TAG, TAG)
def test_tags_have_one_text_only_if_they_are_equal(one, other):
    assert (str(one) == str(other)) == (one == other)


@given(VERSION, EPOCH, TEXT)
def test_lagging_tag_never_has_the_text_of_a_strict_one(version, epoch, space):
    strict = Tag(version, epoch, space)
    assert str(strict) != str(Tag(version, epoch, space, lagging=True))
    assert str(strict) != str(Tag(version + "~", epoch, space))


@given(TAG, TEXT, TAG, TEXT)
def test_salts_are_equal_only_if_tag_and_user_salt_are(one, one_salt, other, other_salt):
    same = compose_salt(str(one), one_salt) == compose_salt(str(other), other_salt)
    assert same == ((one, one_salt) == (other, other_salt))


@given(VERSION, TEXT, st.booleans())
def test_named_tag_is_a_salt_that_lmcache_accepts(version, space, lagging):
    salt = compose_salt(str(Tag(version, namespace=space, lagging=lagging)), None)
    assert len(salt) <= 128
    assert salt.isascii()
    assert not set(salt) & set("@/\\\0")


@given(VERSION, TEXT, st.booleans())
def test_tag_with_an_epoch_is_a_salt_that_lmcache_accepts(version, space, lagging):
    # An engine's instance is a uuid's hex; see activation.py.
    book = ledger(version, instance="f" * 12, namespace=space, lag=int(lagging))
    book.install_unnamed()
    salt = compose_salt(str(book.current), None)
    assert not set(salt) & set("@/\\\0")
    assert len(salt) <= 128 + len("#e1-") + 12 + 5


def test_long_version_is_carried_as_a_digest():
    long = "v" * 300
    assert "sha256-" in str(Tag(long))
    assert str(Tag(long)) != str(Tag(long + "v"))
    assert Tag(long).label == long


def test_first_version_is_current_and_the_whole_window():
    book = ledger("0")
    assert (book.current, book.window(), book.changes) == (Tag("0"), ("0",), 0)
    assert (book.lag_of("0"), book.order_of("0"), book.lag_of("1"), book.order_of("1")) == (0, 1, None, 0)


def test_negative_lag_is_refused():
    with pytest.raises(ValueError, match="max_version_lag"):
        ledger(lag=-1)


def test_same_version_twice_is_no_change():
    for lag in (0, 1):
        book = ledger(lag=lag)
        assert not book.install("1")
        assert book.install("2")
        assert not book.install("2")
        assert book.changes == 1


def test_window_holds_the_most_recently_installed_newest_first():
    book = ledger(lag=2)
    for version in "2345":
        book.install(version)
    assert labels(book) == ["5", "4", "3"]
    assert [book.lag_of(text) for text in book.window()] == [0, 1, 2]
    assert book.lag_of("2~") is None


def test_order_grows_with_the_time_of_installation():
    book = ledger()
    for version in "231":
        book.install(version)
    assert book.order_of("2") < book.order_of("3") < book.order_of("1")
    assert book.order_of("never") == 0


def test_strict_roll_back_uses_the_old_tag_again():
    book = ledger()
    book.install("2")
    assert book.install("1")
    assert (str(book.current), book.window()) == ("1", ("1",))


def test_lagging_roll_back_gets_a_fresh_tag():
    book = ledger(lag=1)
    book.install("2")
    assert book.install("1")
    assert str(book.current) != "1~"
    assert book.current.version == "1"
    assert [book.tag_for(text).version for text in book.window()] == ["1", "2"]
    assert not book.install("1")
    book.install("2")
    seen = {str(book.current)}
    for version in "12" * 3:
        book.install(version)
        assert str(book.current) not in seen
        seen.add(str(book.current))


def test_unnamed_weights_are_never_the_ones_before():
    for lag in (0, 1):
        book = ledger(lag=lag)
        before = str(book.current)
        book.install_unnamed()
        first = str(book.current)
        book.install_unnamed()
        assert len({before, first, str(book.current)}) == 3
        assert book.current.version == "1"
        assert book.install("1")
        assert str(book.current) != first


def test_epochs_differ_between_instances():
    texts = set()
    for instance in ("a", "b"):
        book = ledger(instance=instance, lag=1)
        for change in (book.install_unnamed, book.suspend, lambda book=book: book.install("1")):
            change()
            texts.add(str(book.current))
    assert len(texts) == 6


@pytest.mark.parametrize("lag", [0, 2])
def test_nothing_but_the_current_half_written_weights_may_be_used_while_suspended(lag):
    book = ledger(lag=lag)
    book.install("2")
    seen = set(book.window())
    for _ in range(2):
        book.suspend()
        assert book.is_suspended
        assert book.window() == (str(book.current),)
        assert book.window()[0] not in seen
        seen |= set(book.window())
    assert book.install("3")
    assert not book.is_suspended
    assert labels(book) == ["3", "2", "1"][: lag + 1]


def test_weights_written_again_under_the_same_name_are_a_change():
    for lag in (0, 1):
        book = ledger(lag=lag)
        book.suspend()
        assert book.install("1")
        assert not book.is_suspended
        assert book.current.version == "1"
    assert [book.tag_for(text).version for text in book.window()] == ["1", "1"]


def test_half_written_weights_never_enter_the_window():
    book = ledger(lag=3)
    book.suspend()
    torn = str(book.current)
    book.install_unnamed()
    book.install("2")
    assert torn not in book.window()
    assert len(book.window()) == 3


def test_versions_tags_are_found_by_version_and_by_label():
    book = ledger(lag=1)
    book.install("2")
    book.install("1")
    assert len(book.tags_of_version("1")) == 2
    assert book.tags_of_version(book.current.label) == (str(book.current),)
    assert book.tags_of_version("never") == ()


def test_namespace_is_part_of_every_tag():
    book = ledger(namespace="team/a")
    book.install_unnamed()
    assert str(book.current).startswith("team%2Fa:1#")
    book.suspend()
    assert str(book.current).startswith("team%2Fa:1#")
    book.install("2")
    assert str(book.current) == "team%2Fa:2"


def test_memory_is_bounded_and_forgets_the_oldest(monkeypatch):
    monkeypatch.setattr(namespace, "_MAX_REMEMBERED_TAGS", 8)
    book = ledger("0", lag=1)
    for number in range(1, 50):
        book.install(str(number))
        if number % 3 == 0:
            book.suspend()
            book.install_unnamed()
    assert len(book._orders) == len(book._tags) <= 8 + 2
    assert book.order_of("0~") == 0
    assert all(book.tag_for(text) is not None and book.order_of(text) for text in book.window())


STEP = st.one_of(
    st.tuples(st.just("install"), st.sampled_from(["1", "2", "3", "~", "1#e1-a"])),
    st.just(("install_unnamed", None)),
    st.just(("suspend", None)),
)


@given(st.integers(0, 3), st.lists(STEP, max_size=30))
def test_window_is_the_last_installed_states_in_any_history(lag, steps):
    book = ledger(lag=lag)
    installed, suspended = [str(book.current)], None
    for name, argument in steps:
        before = str(book.current)
        changed = getattr(book, name)(*([argument] if argument else []))
        now = str(book.current)
        if name == "suspend":
            suspended = now
        else:
            suspended = None
            assert (now == before) == (changed is False)
            if lag and changed is not False:
                assert now not in installed  # nothing is left over under a tag that is new
            if now in installed:
                installed.remove(now)
            installed.append(now)
        assert book.window() == ((suspended,) if suspended else tuple(installed[: -lag - 2 : -1]))
        assert [book.lag_of(text) for text in book.window()] == list(range(len(book.window())))
        orders = [book.order_of(text) for text in book.window()]
        assert orders == sorted(orders, reverse=True)
        assert book.order_of(now) == max(book._orders.values())
