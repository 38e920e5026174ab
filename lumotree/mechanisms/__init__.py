"""Published verification and continuation policies behind the one protocol, to be audited and timed alike.

Each class implements a policy from its paper's description: how a tree is verified and how the state after the accepted
path comes to be. None of it is the papers' code; what a description leaves open is our reading, and each docstring says
which parts are. They are written for accuracy columns and for counting bytes and steps; only `bank_walk` and our own
kernels are tuned, so a time in torch says what the policy costs in torch.

| name | verification | continuation |
| --- | --- | --- |
| `reference` | one row at a time | the chain itself |
| `bank_walk` | sequential walk, every row's state kept (Triton) | copy of the accepted row's state |
| `treewy` | ancestor-masked triangular solve | rebuilt from a stash at the next verification |
| `weaver` | ancestor-masked triangular solve | short recurrence over the path |
| `specla` | recurrence along parallel paths | factors kept, one fused update later |
| `snapshot_chain` | one chain, from a snapshot | snapshot restored, accepted rows replayed |
"""
