"""Recurrent layers that are fast and stash almost nothing, with the interfaces of their torch.nn namesakes."""

from torchecho.nn.convert import convert, revert
from torchecho.nn.gru import GRU
from torchecho.nn.lstm import LSTM
from torchecho.nn.recurrent import Recurrent
from torchecho.nn.rnn import RNN
from torchecho.nn.variant_lstm import VariantLSTM

__all__ = ["GRU", "LSTM", "RNN", "Recurrent", "VariantLSTM", "convert", "revert"]
