"""Recurrent layers that are fast and stash almost nothing, with the interfaces of their torch.nn namesakes."""

from torchecho.nn.convert import convert, revert
from torchecho.nn.gru import GRU
from torchecho.nn.lstm import LSTM
from torchecho.nn.rnn import RNN

__all__ = ["GRU", "LSTM", "RNN", "convert", "revert"]
