"""The command line: `holdfast ls | show | verify | diff`. Never imports torch."""
