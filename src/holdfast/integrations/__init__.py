"""Holdfast in the training frameworks: each module belongs to one framework, and imports it when it is imported.

`import holdfast` imports none of them. A plug-in keeps the framework's own command line and callbacks; what it
cannot carry is refused by name.
"""
