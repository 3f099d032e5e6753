"""From the command line to plan.json: request, resume checks, decisions, preflight. Never imports
torch."""
