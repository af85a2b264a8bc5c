"""The sharding rules, one folder per family; `enable(only=)` and `report()` use the folders' names."""
