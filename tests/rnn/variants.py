"""LSTM variants written from the papers, one sequence and one step at a time: what the tests of variants expect."""

import torch

EPSILON = 1e-5


def normalised(row, scale, shift):
    """Normalise a vector: Ba et al. 2016, equation 4."""
    mean = row.mean()
    deviation = (row - mean).pow(2).mean().add(EPSILON).sqrt()
    return (row - mean) / deviation * scale + (0 if shift is None else shift)


def one_sequence(x, h, c, weights, variant, *, drop=None, zone_cell=None, zone_hidden=None):
    """Run [T, I] through one direction; `weights` by name, zoneout as [T, H] masks or as the expectation."""
    outputs = []
    for t, row in enumerate(x):
        read = h if drop is None else h * drop
        inputs, products = weights["weight_ih"] @ row, weights["weight_hh"] @ read
        if variant["layer_norm"]:
            inputs = normalised(inputs, weights["norm_ih"], weights.get("bias_ih"))
            products = normalised(products, weights["norm_hh"], weights.get("bias_hh"))
        elif "bias_ih" in weights:
            inputs, products = inputs + weights["bias_ih"], products + weights["bias_hh"]
        parts = (inputs + products).split(len(c))
        peep = weights["peephole"].split(len(c)) if variant["peephole"] else [torch.zeros_like(c)] * 3
        i = torch.sigmoid(parts[0] + peep[0] * c)
        f = 1 - i if variant["coupled"] else torch.sigmoid(parts[1] + peep[1] * c)
        new_c = f * c + i * torch.tanh(parts[-2])
        o = torch.sigmoid(parts[-1] + peep[-1] * new_c)
        seen = normalised(new_c, weights["norm_c"], weights.get("norm_c_bias")) if variant["layer_norm"] else new_c
        new_h = o * torch.tanh(seen)
        new_h = weights["weight_hr"] @ new_h if "weight_hr" in weights else new_h
        stay_c, stay_h = (0 if zone is None else zone[t] for zone in (zone_cell, zone_hidden))
        c, h = stay_c * c + (1 - stay_c) * new_c, stay_h * h + (1 - stay_h) * new_h
        outputs.append(h)
    return torch.stack(outputs), h, c
