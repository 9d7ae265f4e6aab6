"""Parallel text: catalogues, tab-separated files, vocabularies and batches of the translator example."""

import random
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import pytest
import torch

from examples.nmt import corpus
from examples.nmt.batches import (
    BOS,
    EOS,
    PAD,
    UNK,
    Bucket,
    Example,
    Vocabularies,
    Vocabulary,
    build_vocabularies,
    fill_buckets,
    fixed_batch,
    make_batches,
    make_validation_batches,
)
from examples.nmt.corpus import CorpusError, Pair, clean, read_django, read_po, read_tsv, split

CATALOGUE = r"""# A comment.
msgid ""
msgstr ""
"Language: de\n"

#. An extracted comment
#: some/file.py:12
msgctxt "button"
msgid "Save"
msgstr "Sichern"

msgid ""
"Two\n"
"lines with \"quotes\""
msgstr "Zwei Zeilen"

#, python-format
msgid "%(n)d hour"
msgid_plural "%(n)d hours"
msgstr[0] "%(n)d Stunde"
msgstr[1] "%(n)d Stunden"

msgid "Nobody has translated this"
msgstr ""

#, fuzzy, python-format
msgid "Guessed"
msgstr "Geraten"
#~ msgid "Obsolete"
#~ msgstr "Veraltet"
msgid "Right after"
msgstr "Gleich danach"
"""


def write(folder: Path, text: str | bytes, name: str = "text") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_catalogue_gives_translated_messages_only(tmp_path):
    assert read_po(write(tmp_path, CATALOGUE)) == [
        Pair("Save", "Sichern"),
        Pair('Two lines with "quotes"', "Zwei Zeilen"),
        Pair("%(n)d hour", "%(n)d Stunde"),
        Pair("%(n)d hours", "%(n)d Stunden"),
        Pair("Right after", "Gleich danach"),
    ]


def test_language_with_one_plural_form_uses_it_for_both(tmp_path):
    text = 'msgid "%d day"\nmsgid_plural "%d days"\nmsgstr[0] "%d ngày"\n'
    assert read_po(write(tmp_path, text)) == [Pair("%d day", "%d ngày"), Pair("%d days", "%d ngày")]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ('msgid "a"\nmsgstr "b"\nnonsense\n', 3),
        ('msgid "a"\nmsgstr "b\n', 2),
        ('"no keyword before"\n', 1),
        ('msgid "a"\nmsgstr "\\q"\n', 2),
    ],
)
def test_broken_catalogue_is_named_with_its_line(tmp_path, text, number):
    path = write(tmp_path, text)
    with pytest.raises(CorpusError, match=f"{path}:{number}: "):
        read_po(path)


def test_tsv_skips_blank_lines_and_accepts_windows_endings(tmp_path):
    path = write(tmp_path, "\ufeffone\teins\r\n\r\ntwo \t zwei\r\n")
    assert read_tsv(path) == [Pair("one", "eins"), Pair("two", "zwei")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\tb\nc\n", ":2: expected SOURCE<TAB>TARGET, found 1 non-empty of 1"),
        ("a\tb\n\nc\td\te\n", ":3: expected SOURCE<TAB>TARGET, found 3 non-empty of 3"),
        ("\tb\n", ":1: expected SOURCE<TAB>TARGET, found 1 non-empty of 2"),
        (b"a\tb\n\xff\tc\n", ":2: not UTF-8 text"),
        ("", ": no lines"),
    ],
)
def test_malformed_tsv_is_named_with_its_line(tmp_path, text, message):
    with pytest.raises(CorpusError) as caught:
        read_tsv(write(tmp_path, text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_is_one_line(tmp_path):
    with pytest.raises(CorpusError, match=r"no\.tsv: cannot be read: No such file"):
        read_tsv(tmp_path / "no.tsv")


def test_missing_django_says_what_to_install(monkeypatch):
    monkeypatch.setattr(corpus, "find_spec", lambda name: None)
    with pytest.raises(CorpusError, match="pip install Django"):
        read_django()


@pytest.mark.skipif(find_spec("django") is None, reason="Django, whose catalogues are read, is not installed")
def test_django_has_both_languages_and_names_the_others():
    assert Pair("Monday", "Thứ 2") in read_django("vi")
    assert Pair("Monday", "Montag") in read_django("de")
    with pytest.raises(CorpusError, match=r"no catalogue of 'xx'; it has .*de, .*vi"):
        read_django("xx")


def test_cleaning_normalises_and_drops_repeats():
    decomposed = "Thu\u031b\u0301"
    assert clean([Pair(" a\n b", decomposed), Pair("a b", "Th\u1ee9"), Pair("x", " ")]) == [Pair("a b", "Th\u1ee9")]


def test_split_keeps_a_source_on_one_side_and_repeats():
    pairs = [Pair(str(number // 2), str(number)) for number in range(40)]
    training, validation = split(pairs, validation=0.1, seed=3)
    assert (training, validation) == split(pairs, validation=0.1, seed=3)
    assert sorted([*training, *validation], key=pairs.index) == pairs
    assert len({pair.source for pair in validation}) == 2
    assert not {pair.source for pair in validation} & {pair.source for pair in training}
    with pytest.raises(CorpusError, match="too few"):
        split(pairs[:2])


@pytest.mark.parametrize(("level", "text"), [("character", "ab ba"), ("word", "the cat the dog")])
def test_vocabulary_round_trip(level, text):
    vocabulary = Vocabulary([text], level)
    assert len(vocabulary) == 4 + 3
    assert vocabulary.decode([BOS, *vocabulary.encode(text), EOS, UNK, PAD]) == text
    assert vocabulary.encode("?") == [UNK]


def test_vocabulary_keeps_the_most_frequent_tokens():
    assert Vocabulary(["b a b c a b"], "word", limit=2).tokens[4:] == ("b", "a")
    with pytest.raises(ValueError, match=r"'syllable'.*character, word"):
        Vocabulary([], "syllable")


def make_buckets(lengths):
    """Buckets 4:4 and 8:8 of pairs with the given (source, target) lengths in characters."""
    pairs = [Pair("a" * source, "b" * target) for source, target in lengths]
    return fill_buckets(pairs, build_vocabularies(pairs), [Bucket(8, 8), Bucket(4, 4)])


def test_each_pair_goes_to_the_smallest_bucket_with_room_for_eos():
    buckets = make_buckets([(3, 3), (4, 1), (1, 4), (7, 7), (8, 1), (1, 8)])
    assert {size: len(rows) for size, rows in buckets.examples.items()} == {Bucket(4, 4): 1, Bucket(8, 8): 3}
    assert buckets.num_dropped == 2
    assert len(buckets) == 4
    with pytest.raises(CorpusError, match="none of 1 pairs fits a bucket; the largest is 8:8"):
        make_buckets([(9, 9)])


def test_batches_have_few_shapes_and_an_order_that_the_seed_fixes():
    buckets = make_buckets([(1 + number % 7, 1 + number % 5) for number in range(50)])
    first, again, other = (list(islice(make_batches(buckets, 4, seed), 30)) for seed in (1, 1, 2))
    assert {tuple(tensor.shape for tensor in batch) for batch in first} == {((4, 4),) * 3, ((4, 8),) * 3}
    assert all(torch.equal(one, two) for pair in zip(first, again, strict=True) for one, two in zip(*pair, strict=True))
    assert any(
        len(one[0]) != len(two[0]) or not torch.equal(one[0], two[0])
        for one, two in zip(first, other, strict=True)
        if one[0].shape == two[0].shape
    )


def test_an_epoch_holds_every_example():
    order = random.Random(0)
    pairs = [Pair("".join(order.choices("abc", k=3)), "b") for _ in range(10)]
    buckets = fill_buckets(pairs, build_vocabularies(pairs), [Bucket(4, 4)])
    epoch = list(islice(make_batches(buckets, 4), 3))
    seen = {tuple(row) for batch in epoch for row in batch.source.tolist()}
    assert seen == {(*example.source, EOS) for example in buckets.examples[Bucket(4, 4)]}


def test_rows_are_shifted_by_one_and_padded():
    vocab = Vocabularies(Vocabulary(["ab"]), Vocabulary(["xyz"]))
    buckets = fill_buckets([Pair("ab", "xyz")], vocab, [Bucket(4, 5)])
    (batch,) = make_validation_batches(buckets, 2)
    a, b = vocab.source.encode("ab")
    x, y, z = vocab.target.encode("xyz")
    assert batch.source.tolist() == [[a, b, EOS, PAD], [EOS, PAD, PAD, PAD]]
    assert batch.target_in.tolist() == [[BOS, x, y, z, PAD], [BOS, PAD, PAD, PAD, PAD]]
    assert batch.target_out.tolist() == [[x, y, z, EOS, PAD], [PAD] * 5]


def test_validation_holds_each_example_once():
    buckets = make_buckets([(3, 2)] * 5 + [(6, 6)] * 3)
    batches = make_validation_batches(buckets, 4)
    assert [tuple(batch.source.shape) for batch in batches] == [(4, 4), (4, 4), (4, 8)]
    assert sum(int((batch.target_out == EOS).sum()) for batch in batches) == 8


@pytest.mark.parametrize("with_text", [True, False])
def test_fixed_batch_has_no_padding_and_repeats(with_text):
    pairs = [Pair("abcdef", "uvw"), Pair("gh", "xyz")]
    vocab = build_vocabularies(pairs)
    batch = fixed_batch(3, 5, 7, vocab, seed=1, pairs=pairs if with_text else ())
    assert [tuple(tensor.shape) for tensor in batch] == [(3, 5), (3, 7), (3, 7)]
    assert not any((tensor == PAD).any() for tensor in batch)
    assert (batch.target_in[:, 0] == BOS).all()
    assert torch.equal(batch.target_in[:, 1:], batch.target_out[:, :-1])
    again = fixed_batch(3, 5, 7, vocab, seed=1, pairs=pairs if with_text else ())
    assert all(torch.equal(one, two) for one, two in zip(batch, again, strict=True))


def test_fixed_batch_is_real_text():
    pairs = [Pair("abcdef", "uvwxyz")]
    vocab = build_vocabularies(pairs)
    batch = fixed_batch(2, 4, 8, vocab, pairs=pairs)
    assert vocab.source.decode(batch.source[0].tolist()) == "abcd"
    assert vocab.target.decode(batch.target_out[1].tolist()) == "uvwxyzuv"
    assert Example(vocab.source.encode("abcd"), []).source == batch.source[1].tolist()
