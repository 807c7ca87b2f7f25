"""The folder of an unfinished bundle in which packed weights are noted, so that an interrupted export can be
resumed."""

NOTES = ".notes"  # see ``packer.Packer``
