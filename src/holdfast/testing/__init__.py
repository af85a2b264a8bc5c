"""For those who build on Holdfast: a suite for storages, faults on purpose, power loss, random layouts.

`conformance` is what every storage must do; `faults` wraps a storage that fails when told to;
`powerloss` lists what a disk may hold after the power went; `strategies` (needs hypothesis)
makes layouts and states. Nothing of Holdfast imports this package.
"""
