"""Everything that can be checked and measured of a bundle on the device at hand, in pieces that resume."""
