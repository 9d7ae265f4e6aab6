"""An attention LSTM translator, written as plain PyTorch: corpus, batches, model and training loop."""
