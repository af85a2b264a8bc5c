"""Plans of which rank reads or writes which bytes, as frozen values. Pure: no I/O, no torch."""
