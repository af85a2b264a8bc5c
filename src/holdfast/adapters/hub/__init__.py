"""The hub's names of transformers models: conversion rules traced and written as mappings. Imports torch."""
