"""The scaling check: measures 1, 2, … ranks of the real product on this machine and says what
limits them. No torch here."""
