"""Performance models of clusters: what a training step costs with each compressor.

`networks` has lists of tensors, `clusters` links and devices, `rates` published throughput,
`traffic` the bytes that an exchange hands to collectives, `work` and `codec` the times of encoding
and decoding. `prediction`, `links` and `validation` are the analyses of
`gcbench scale`; `advice`, with `evidence` for the loss of accuracy, is that of `gcbench advise`.
"""
