"""Hang detection: is a running rank stuck, where, and which rank do the others wait for? Observes
from outside, without torch."""
