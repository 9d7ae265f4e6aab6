"""The translator example itself: masking, gradients, learning, decoding, tracing and its command line."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import pad

from examples.nmt import train as program
from examples.nmt.batches import EOS, PAD, Batch, Bucket, build_vocabularies, fill_buckets, make_validation_batches
from examples.nmt.corpus import Pair
from examples.nmt.model import Attention, ModelSize
from examples.nmt.train import greedy_translations, make_model, make_optimizer, train_step, validation_loss

PAIRS = [Pair("one two", "eins zwei"), Pair("three", "drei"), Pair("four", "vier"), Pair("five six", "fünf sechs")]
SIZE = ModelSize(hidden=24, embedding=12, dropout=0.0)
FOLDER = Path(program.__file__).parent


def make_vocab_and_batch(rows=4):
    vocab = build_vocabularies(PAIRS)
    (batch,) = make_validation_batches(fill_buckets(PAIRS[:rows], vocab, [Bucket(10, 12)]), rows)
    return vocab, batch


def test_source_padding_does_not_change_the_loss():
    """Equal but for rounding: matrix products of another shape may sum in another order."""
    vocab, batch = make_vocab_and_batch()
    model = make_model(SIZE, vocab).double()
    longer = pad(batch.source, (0, 7), value=PAD)
    loss = model(*batch)
    torch.testing.assert_close(model(longer, batch.target_in, batch.target_out), loss, rtol=1e-12, atol=0)
    assert torch.equal(model.translate(longer, 12), model.translate(batch.source, 12))
    changed = batch.source.clone()
    changed[0, 0] = changed[0, 1]
    assert model(changed, batch.target_in, batch.target_out) != loss


def test_loss_is_the_mean_over_real_target_tokens():
    vocab, batch = make_vocab_and_batch()
    model = make_model(SIZE, vocab).double()
    counts = (batch.target_out != PAD).sum(dim=1)
    alone = torch.stack([model(*(tensor[row : row + 1] for tensor in batch)) for row in range(4)])
    torch.testing.assert_close(model(*batch), (alone * counts).sum() / counts.sum(), rtol=1e-12, atol=0)


def test_attention_is_the_softmax_over_states_before_the_padding():
    attention = Attention(SIZE).double()
    states, query = torch.randn(1, 5, 24).double(), torch.randn(1, 24).double()
    padding = torch.tensor([[False, False, False, True, True]])
    scores = [attention.score(torch.tanh(attention.query(query[0]) + attention.key(states[0, s]))) for s in range(3)]
    weights = torch.softmax(torch.cat(scores), dim=0)
    expected = sum(weights[s] * states[0, s] for s in range(3))
    torch.testing.assert_close(attention(query, attention.remember(states, padding))[0], expected)


def test_every_parameter_gets_a_gradient_and_padding_none():
    vocab, batch = make_vocab_and_batch()
    model = make_model(ModelSize(hidden=24, embedding=12, dropout=0.2, label_smoothing=0.1), vocab)
    model(*batch).backward()
    assert [name for name, parameter in model.named_parameters() if not parameter.grad.any()] == []
    assert not model.encoder.embedding.weight.grad[PAD].any()


def test_gradients_match_finite_differences():
    vocab, batch = make_vocab_and_batch(rows=2)
    model = make_model(ModelSize(hidden=4, embedding=3, dropout=0.0), vocab).double()
    names, values = zip(*model.named_parameters(), strict=True)

    def loss(*parameters):
        return torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), tuple(batch))

    assert torch.autograd.gradcheck(loss, values, fast_mode=True)


def test_a_repeated_batch_is_learnt_by_heart():
    vocab, batch = make_vocab_and_batch()
    model = make_model(SIZE, vocab, seed=1)
    optimizer = make_optimizer(model, rate=2e-2)
    losses = [float(train_step(model, optimizer, batch)) for _ in range(120)]
    assert losses[0] > 2 * losses[20] > 4 * losses[-1]
    assert validation_loss(model, [batch, batch]) < 0.1
    texts = greedy_translations(model, batch, vocab, count=4)
    assert texts == [(pair.source, pair.target, pair.target) for pair in PAIRS]
    assert model.training


def test_validation_ignores_filler_rows():
    vocab, batch = make_vocab_and_batch()
    model = make_model(SIZE, vocab).double()
    (filled,) = make_validation_batches(fill_buckets(PAIRS, vocab, [Bucket(10, 12)]), 7)
    assert filled.source.shape == (7, 10)
    assert validation_loss(model, [filled]) == pytest.approx(model(*batch).item(), rel=1e-12)


def test_translations_end_with_padding():
    vocab, batch = make_vocab_and_batch()
    model = make_model(SIZE, vocab)
    model.output.bias.data[EOS] = 100.0
    assert model.translate(batch.source, 5).tolist() == [[EOS, PAD, PAD, PAD, PAD]] * 4
    model.output.bias.data[EOS] = -100.0
    assert model.translate(batch.source, 5).shape == (4, 5)


def test_the_seed_fixes_weights_and_dropout():
    vocab, batch = make_vocab_and_batch()
    size = ModelSize(hidden=8, embedding=8, dropout=0.5)
    first, again, other = (make_model(size, vocab, seed)(*batch) for seed in (4, 4, 5))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("values", [{"hidden": 7}, {"embedding": 0}, {"dropout": 1.0}, {"label_smoothing": -0.1}])
def test_sizes_that_cannot_be_built_are_refused(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        ModelSize(**values)


def test_the_model_is_one_graph():
    vocab, batch = make_vocab_and_batch(rows=2)
    model = make_model(SIZE, vocab)
    short = Batch(batch.source[:, :3], batch.target_in[:, :2], batch.target_out[:, :2])
    with torch._dynamo.config.patch(allow_rnn=True):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(*short), model(*short))


def test_bfloat16_autocast_trains():
    vocab, batch = make_vocab_and_batch()
    model = make_model(SIZE, vocab)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(*batch)
    loss.backward()
    torch.testing.assert_close(loss, model(*batch), rtol=2e-2, atol=0)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.fixture
def tsv(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{pair.source}\t{pair.target}\n" for pair in PAIRS), encoding="utf-8")
    return path


TINY = ["--hidden", "8", "--embedding", "8", "--steps", "2", "--batch", "2", "--buckets", "10:12"]


@pytest.mark.parametrize("start", [[str(FOLDER / "train.py")], ["-m", "nmt.train"]])
def test_it_runs_as_a_script_and_as_a_module(tsv, start):
    done = subprocess.run(
        [sys.executable, *start, "--corpus", tsv, *TINY], cwd=FOLDER.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "step     2  loss" in done.stdout
    assert "validation loss" in done.stdout
    assert "translation" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--corpus", "nowhere.tsv"], "nowhere.tsv: cannot be read"),
        (["--buckets", "48"], "expected SOURCE:TARGET lengths such as 48:48, found '48'"),
        (["--steps", "0"], "expected a whole number above zero, found '0'"),
        (["--hidden", "7"], "hidden must be even"),
        (["--device", "abacus"], "'abacus' cannot be used"),
    ],
)
def test_wrong_usage_exits_with_2_and_one_line(capsys, words, message):
    with pytest.raises(SystemExit) as caught:
        program.main(words)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_help_shows_an_example(capsys):
    with pytest.raises(SystemExit):
        program.main(["--help"])
    assert "python examples/nmt/train.py --steps 200 --batch 64" in capsys.readouterr().out


def test_interruption_is_polite(monkeypatch, capsys, tsv):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "train_step", interrupt)
    assert program.main(["--corpus", str(tsv), *TINY]) == 130
    assert "interrupted" in capsys.readouterr().err
