"""Programs and live modules: export a model as a program, and run a program as a module. Imports torch."""
