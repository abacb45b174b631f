"""Performance models of clusters: what a step costs with each compressor.

`networks` are lists of tensors, `clusters` are links and devices, `traffic` is what an exchange
hands to collectives, `work` is what encoding and decoding cost; `prediction`, `figure5`,
`breakeven` and `validation` are the analyses that `gcbench scale` makes of them.
"""
