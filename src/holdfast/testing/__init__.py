"""Test tools for code built on Holdfast: a conformance suite, injected faults, power loss, random layouts.

`conformance` tests what every storage must do. `faults` wraps a storage that fails on demand.
`powerloss` enumerates the states of a disk after a power loss. `strategies` (needs hypothesis)
generates layouts and states. Nothing else in Holdfast imports this package.
"""
