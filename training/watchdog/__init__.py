"""Looks at running ranks from outside: is one stuck, where, and who keeps the others waiting? No
torch here."""
